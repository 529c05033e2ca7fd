"""Teacher forcing: how much of a target the model would say if it read the target's earlier tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from factpatch.models.base import TaskModel
from factpatch.models.rows import NO_TARGET, POSITIONS_PER_BATCH, Rows


@torch.no_grad()
def token_accuracy(model: TaskModel, rows: Rows) -> Tensor:
    """The share of each row's target tokens that are the most likely ones, without start and end tokens: (rows,)."""
    assert rows.labels is not None
    labels = rows.labels.flatten()
    tokenizer = model.tokenizer
    around = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    ignored = torch.tensor([NO_TARGET, *(one for one in around if one is not None)], device=labels.device)
    positions = torch.isin(labels, ignored, invert=True).nonzero().squeeze(1)
    features = model.features(replace(rows, target_positions=positions))
    best = [model.scores(part).argmax(-1) for part in features.split(POSITIONS_PER_BATCH)]
    row = positions // rows.labels.shape[1]
    right = torch.cat(best).eq(labels[positions]).float()
    counts = torch.bincount(row, minlength=len(rows)).clamp(min=1)
    return torch.zeros(len(rows), device=labels.device).index_add(0, row, right) / counts
