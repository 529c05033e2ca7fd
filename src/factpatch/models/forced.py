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

    Generating takes far longer than one forward pass, so a decoder generates only once all tokens of a pending target
    are the most likely ones. A row is then tested only if this holds for its own target, as if it were alone.
    """
    tested = list(pending)
    if model.kind == "causal":
        likely = token_accuracy(model, rows).eq(1).tolist()
        tested = [waits and is_likely for waits, is_likely in zip(pending, likely, strict=True)]
    if not any(tested):
        return tested
    answers = [ranked[0] for ranked in model.decide(rows, edits=len(rows))]
    return [test and same(answer, target) for test, answer, target in zip(tested, answers, targets, strict=True)]
