"""Teacher forcing: how much of a target the model would say if it read the target's earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factpatch.facts import same
from factpatch.models.base import TaskModel
from factpatch.models.rows import POSITIONS_PER_BATCH, Rows


@torch.no_grad()
def token_accuracy(model: TaskModel, rows: Rows) -> Tensor:
    """Returns the share of each row's target tokens that are the most likely ones: (rows,).

    Start and end tokens do not count.
    """
    tokenizer = model.tokenizer
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    rows = rows.at_targets(ignored=[token for token in special if token is not None])
    best = [model.scores(part).argmax(-1) for part in model.features(rows).split(POSITIONS_PER_BATCH)]
    return rows.means(torch.cat(best).eq(rows.target_labels).float())


@torch.no_grad()
def says_targets(model: TaskModel, rows: Rows, targets: Sequence[str], pending: Sequence[bool]) -> list[bool]:
    """Returns whether the model answers each pending row with its target; each row belongs to an edit of its own.

    Generating takes far longer than one forward pass, so a decoder generates only if all target tokens of some pending
    row are the most likely ones.
    """
    open_rows = torch.tensor(pending, device=model.device)
    if model.kind == "causal" and not (token_accuracy(model, rows).eq(1) & open_rows).any():
        return [False] * len(rows)
    answers = [ranked[0] for ranked in model.decide(rows, edits=len(rows))]
    said = [same(answer, target) for answer, target in zip(answers, targets, strict=True)]
    return [there and open_ for there, open_ in zip(said, pending, strict=True)]
