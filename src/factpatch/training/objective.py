"""The objective of one step: the edit loss, and what must not change (the paper, §3.2 and §4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.constraints import kl, lp
from factpatch.deltas import Delta, LowRank, add
from factpatch.editors import TrainableEditor
from factpatch.engine import edited
from factpatch.models import Rows, TaskModel
from factpatch.models.base import NO_TARGET, POSITIONS_AT_ONCE
from factpatch.training.config import TrainConfig
from factpatch.training.table import Numbers, RevisionTable, StepBatch, Targets

ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}  # of the unedited model; always the same rows together, so that runs repeat
MEMORY_SHARE = 0.2  # of a GPU's free memory, that the unedited model's outputs may take
LEAST_DOUBT = 1e-3  # of any prediction, so that the surest ones are drawn, too


@dataclass(frozen=True)
class Measured:
    """A step's figures, or a part's share of them; still on the device."""

    loss: Tensor  # ()  of the edits
    constraints: Tensor  # (constraints,)


class Objective:
    """L over x and its paraphrases, and each constraint C."""

    def __init__(self, model: TaskModel, config: TrainConfig, unedited: Tensor | None = None):
        """`unedited`: what the unedited model says at each kept place; computed anew for each batch, if left out."""
        self.model = model
        self.config = config
        self.unedited = unedited

    def __call__(self, editor: TrainableEditor, batch: StepBatch) -> Measured:
        """Differentiable in the editor's parameters."""
        deltas = self._update(editor, batch)
        with edited(self.model.layers, deltas):
            features = self.model.features(batch.rows)
        edit_features, keep_features = features.split([len(batch.edit.labels), len(batch.keep.labels)])
        losses = F.cross_entropy(
            self.model.scores(edit_features),
            batch.edit.labels,
            label_smoothing=self.config.label_smoothing,
            reduction="none",
        )
        loss = (losses * batch.edit.weights).sum()
        values: list[Tensor] = []
        for name in self.config.constraints:
            if name == "kl":
                values.append(self._kl(batch, keep_features))
            else:
                edits = lp(deltas, self.config.p)
                values.append(edits.sum() / self.config.edits)
        return Measured(loss, torch.stack(values) if values else loss.new_zeros(0))

    def _update(self, editor: TrainableEditor, batch: StepBatch) -> dict[str, Delta]:
        """The edits' changes; with several updates, each is computed on the model as the last one left it."""
        deltas = editor.update(self.model, batch.fact)
        for _ in range(self.config.updates - 1):
            again = editor.update(self.model, batch.fact, under={k: _detached(d) for k, d in deltas.items()})
            deltas = {name: add(delta, again[name]) for name, delta in deltas.items()}
        return deltas

    def _kl(self, batch: StepBatch, features: Tensor) -> Tensor:
        """Of the classes, or of each answer token's distribution; or of the beam's candidates as whole answers.

        Of the beam, Σ p(c) log p(c)/p'(c) over the candidates c, with p' from the losses of their tokens.
        """
        kept = self._kept(batch)
        if self.config.kl_over == "top1":
            return (kl(self.model.head(kept), self.model.head(features)) * batch.keep.weights).sum()
        losses = F.cross_entropy(self.model.scores(features), batch.keep.labels, reduction="none")
        return ((kept[:, 0] * losses + kept[:, 1]) * batch.keep.weights).sum()

    @torch.no_grad()
    def _kept(self, batch: StepBatch) -> Tensor:
        if self.unedited is not None:
            return self.unedited.index_select(0, batch.keep.numbers)
        assert batch.rows.target_positions is not None
        rows = replace(batch.rows, target_positions=batch.rows.target_positions[len(batch.edit.labels) :])
        return _outputs(self.model, rows, batch.keep.labels, self.config.kl_over)


@torch.no_grad()
@no_cudnn_attention()
@tensor_core_products()
def unedited_outputs(
    model: TaskModel, table: RevisionTable, on_share: Callable[[float], object] = lambda share: None
) -> Tensor | None:
    """What the unedited model says to the pool, place by place; None where it is not wanted, or does not fit."""
    if "kl" not in table.config.constraints or not _fits(model, table):
        return None
    kept: Tensor | None = None
    for _, rows, targets in _pool_batches(model, table, on_share):
        outputs = _outputs(model, rows, targets.labels, table.config.kl_over)
        if kept is None:
            kept = outputs.new_zeros(table.target_positions, outputs.shape[1])
        real = targets.weights > 0
        kept[targets.numbers[real]] = outputs[real]
    assert kept is not None
    return kept


@torch.no_grad()
@no_cudnn_attention()
@tensor_core_products()
def doubts(
    model: TaskModel,
    table: RevisionTable,
    unedited: Tensor | None,
    on_share: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """1 − p of the unedited model's prediction, at its least sure token, for each of the pool.

    An edit turns first what is least sure. Of whole answers, p would be the smaller the longer they are. `unedited`:
    its outputs, if kept; of the beam's candidates they say nothing of single tokens.
    """
    found = np.empty(len(table.pool))
    known = unedited if table.config.kl_over == "top1" else None
    for places, rows, targets in _pool_batches(model, table, on_share):
        features = model.features(rows) if known is None else known.index_select(0, targets.numbers)
        losses = _token_losses(model, features, targets.labels)
        least_sure = losses.new_zeros(len(rows)).scatter_reduce(0, _row_of_each_place(rows), losses, "amax")
        predictions = least_sure.view(len(places), -1)[:, 0]  # each before its alternatives, where they are rows, too
        found[places] = -(-predictions.double()).expm1().cpu().numpy()
    return np.maximum(found, LEAST_DOUBT)


def _pool_batches(
    model: TaskModel, table: RevisionTable, on_share: Callable[[float], object]
) -> Iterator[tuple[Numbers, Rows, Targets]]:
    """The whole pool, texts of like length together: places in it, and their batch."""
    order = np.argsort(table.texts.lengths[table.inputs[table.pool]], kind="stable")
    size = max(1, ROWS_AT_ONCE[model.device.type] // table.config.candidates)
    for start in range(0, len(order), size):
        places = order[start : start + size]
        yield (places, *table.kept_batch(table.pool[places]))
        on_share(min(1.0, (start + size) / len(order)))


def _outputs(model: TaskModel, rows: Rows, labels: Tensor, kl_over: str) -> Tensor:
    """Features of each place; of the beam's candidates, tokens · p and p log p, in each place of a candidate."""
    features = model.features(rows)
    if kl_over == "top1":
        return features
    assert rows.labels is not None
    losses = _token_losses(model, features, labels)
    row = _row_of_each_place(rows)
    zeros = losses.new_zeros(len(rows))
    log_p = zeros.index_add(0, row, -losses)
    tokens = zeros.index_add(0, row, labels.ne(NO_TARGET).float())
    return torch.stack([tokens * log_p.exp(), log_p.exp() * log_p], 1)[row]


def _token_losses(model: TaskModel, features: Tensor, labels: Tensor) -> Tensor:
    """Of each place; the scores of a vocabulary are made for some of them at a time."""
    parts = zip(features.split(POSITIONS_AT_ONCE), labels.split(POSITIONS_AT_ONCE), strict=True)
    return torch.cat([F.cross_entropy(model.scores(part), wanted, reduction="none") for part, wanted in parts])


def _row_of_each_place(rows: Rows) -> Tensor:
    assert rows.target_positions is not None
    assert rows.labels is not None
    return rows.target_positions // rows.labels.shape[-1] if rows.labels.dim() == 2 else rows.target_positions


def _fits(model: TaskModel, table: RevisionTable) -> bool:
    """Whether the unedited outputs leave a GPU enough memory for training."""
    if model.device.type != "cuda" or table.config.kl_over == "beam":
        return True
    rows, _ = table.kept_batch(table.pool[:1])
    with torch.no_grad():
        width = model.features(rows).shape[1]
    free, _ = torch.cuda.mem_get_info(model.device)
    return table.target_positions * width * model.model.dtype.itemsize < MEMORY_SHARE * free


def _detached(delta: Delta) -> Delta:
    return (
        LowRank(delta.A.detach(), delta.B.detach())
        if isinstance(delta, LowRank)
        else replace(delta, delta=delta.delta.detach())
    )
