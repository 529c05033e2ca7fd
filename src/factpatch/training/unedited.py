"""Computes the unedited model's outputs for the control inputs, once before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import NO_TARGET, POSITIONS_PER_BATCH
from factpatch.training.batcher import Batcher, ControlTargets
from factpatch.training.sampler import Indices

ROWS_PER_BATCH = {"cpu": 64, "cuda": 1024}  # fixed, so that runs are reproducible
MEMORY_SHARE = 0.2  # maximum share of a GPU's free memory for the table of outputs
LEAST_UNCERTAINTY = 1e-3  # so that control inputs with certain predictions are drawn, too

OnShare = Callable[[float], object]


@torch.no_grad()
@no_cudnn_attention()
@tensor_core_products()
def unedited_outputs(
    model: TaskModel, batcher: Batcher, pool: Indices, on_share: OnShare = lambda share: None
) -> Tensor | None:
    """Computes the outputs for all control inputs: (positions, width). None if they are not needed or do not fit."""
    if "kl" not in batcher.config.constraints or not _fits(model, batcher):
        return None
    table: Tensor | None = None
    for _, rows, targets in _pool_batches(model, batcher, pool, on_share):
        outputs = outputs_of(model, rows, targets.labels, batcher.config.kl_over)
        if table is None:
            table = outputs.new_zeros(batcher.unedited_size, outputs.shape[1])
        real = targets.weights > 0
        table[targets.unedited_index[real]] = outputs[real]
    assert table is not None
    return table


@torch.no_grad()
@no_cudnn_attention()
@tensor_core_products()
def uncertainties(
    model: TaskModel,
    batcher: Batcher,
    pool: Indices,
    unedited: Tensor | None,
    on_share: OnShare = lambda share: None,
) -> NDArray[np.float64]:
    """Computes how uncertain each prediction is: 1 − p of the least certain token, for each revision of the pool.

    Edits are most likely to change uncertain predictions. By the probability of a whole answer, all long answers would
    count as uncertain. `unedited` is the table of outputs, if there is one.
    """
    found = np.empty(len(pool))
    known = unedited if batcher.config.kl_over == "top1" else None  # with "beam" the table has no features
    for members, rows, targets in _pool_batches(model, batcher, pool, on_share):
        features = model.features(rows) if known is None else known.index_select(0, targets.unedited_index)
        losses = _token_losses(model, features, targets.labels)
        largest = losses.new_zeros(len(rows)).scatter_reduce(0, rows.row_of_position, losses, "amax")
        of_predictions = largest.view(len(members), -1)[:, 0]  # the rows of an input begin with its prediction
        found[members] = -(-of_predictions.double()).expm1().cpu().numpy()
    return np.maximum(found, LEAST_UNCERTAINTY)


def outputs_of(model: TaskModel, rows: Rows, labels: Tensor, kl_over: str) -> Tensor:
    """Computes the unedited model's outputs that KL needs at each target position.

    For KL of single predictions these are the features that the head reads, (positions, width). For KL over the beam
    they are (tokens · p, p log p) of the position's candidate, (positions, 2).
    """
    features = model.features(rows)
    if kl_over == "top1":
        return features
    losses = _token_losses(model, features, labels)
    row = rows.row_of_position
    zeros = losses.new_zeros(len(rows))
    log_p = zeros.index_add(0, row, -losses)
    tokens = zeros.index_add(0, row, labels.ne(NO_TARGET).float())
    return torch.stack([tokens * log_p.exp(), log_p.exp() * log_p], 1)[row]


def _pool_batches(
    model: TaskModel, batcher: Batcher, pool: Indices, on_share: OnShare
) -> Iterator[tuple[Indices, Rows, ControlTargets]]:
    """Yields batches of control inputs of similar length: indices in the pool, rows and targets."""
    order = np.argsort(batcher.texts.lengths[batcher.inputs[pool]], kind="stable")
    size = max(1, ROWS_PER_BATCH[model.device.type] // batcher.config.candidates)
    for start in range(0, len(order), size):
        members = order[start : start + size]
        yield (members, *batcher.control_batch(pool[members]))
        on_share(min(1.0, (start + size) / len(order)))


def _token_losses(model: TaskModel, features: Tensor, labels: Tensor) -> Tensor:
    """Computes the cross-entropy at each position, in parts: scores over a whole vocabulary need much memory."""
    parts = zip(features.split(POSITIONS_PER_BATCH), labels.split(POSITIONS_PER_BATCH), strict=True)
    return torch.cat([F.cross_entropy(model.scores(part), wanted, reduction="none") for part, wanted in parts])


def _fits(model: TaskModel, batcher: Batcher) -> bool:
    """Returns True if the table leaves a GPU enough memory for training."""
    if model.device.type != "cuda" or batcher.config.kl_over == "beam":
        return True
    rows, _ = batcher.control_batch(np.array([0]))
    width = model.features(rows).shape[1]
    free, _ = torch.cuda.mem_get_info(model.device)
    return batcher.unedited_size * width * model.model.dtype.itemsize < MEMORY_SHARE * free
