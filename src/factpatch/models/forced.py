"""Teacher forcing: how much of a target the model would say if it read the target's earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

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
