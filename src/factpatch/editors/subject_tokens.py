"""Finds the token at which a fact is written: the last one of its subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factpatch.facts import FactEdit
from factpatch.models import Rows, TaskModel


@dataclass(frozen=True)
class Located:
    """Edits in several contexts, edit-major, and the position of one token in each row."""

    rows: Rows  # x alone and after each prefix, with target a
    positions: Tensor  # (rows,)
    edits: int

    def at_tokens(self, values: Tensor) -> Tensor:
        """Picks the rows' tokens from (rows, tokens, width) or (rows·tokens, width): (edits, contexts, width)."""
        rows = torch.arange(len(self.rows), device=values.device)
        picked = values.reshape(len(rows), -1, values.shape[-1])[rows, self.positions]
        return picked.view(self.edits, -1, values.shape[-1])


def locate(model: TaskModel, edits: Sequence[FactEdit], prefixes: Sequence[str] = ()) -> Located:
    """Finds the last token of each edit's subject or, if the subject is not known or not found, of its prompt.

    The model must be a decoder, whose prompts are padded on the left.
    """
    texts = [prefix + edit.x for edit in edits for prefix in ("", *prefixes)]
    edit_of_row = [edit for edit in edits for _ in range(1 + len(prefixes))]
    encoded = model.encode(texts, model.max_input_tokens)
    rows = model.collate(encoded, model.encode_targets([edit.a for edit in edit_of_row]))
    prompts = [one["input_ids"] for one in encoded]
    width = max(map(len, prompts))
    positions = [
        width - len(prompt) + last_subject_token(model, prompt, edit.subject)
        for prompt, edit in zip(prompts, edit_of_row, strict=True)
    ]
    return Located(rows, torch.tensor(positions, device=model.device), len(edits))


def last_subject_token(model: TaskModel, ids: Sequence[int], subject: str | None) -> int:
    """Returns the index of the token in which the subject's last occurrence ends, or of the last token without one."""
    whole = model.tokenizer.decode(list(ids))
    start = whole.rfind(subject) if subject else -1
    if not subject or start < 0:
        return len(ids) - 1
    end = start + len(subject)
    return next(k for k in range(len(ids)) if len(model.tokenizer.decode(list(ids[: k + 1]))) >= end)
