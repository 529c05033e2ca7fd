"""The objective of one step (De Cao et al., 2021, §3.2 and §4.2): the edit loss, and the constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.constraints import kl, lp
from factpatch.deltas import Delta, add
from factpatch.editors import EditBatch, TrainableEditor
from factpatch.engine import edited
from factpatch.models import TaskModel
from factpatch.training.batcher import StepBatch
from factpatch.training.config import TrainConfig
from factpatch.training.unedited import outputs_of


@dataclass(frozen=True)
class Measured:
    """The objective's values for a step, or one part's share of them, still on the device."""

    loss: Tensor  # ()
    constraints: Tensor  # (constraints,)


class Objective:
    """The edit loss over x and its paraphrases, and the value of each constraint."""

    def __init__(self, model: TaskModel, config: TrainConfig, unedited: Tensor | None = None):
        """`unedited` is the table of the unedited model's outputs; without it they are recomputed for each batch."""
        self.model = model
        self.config = config
        self.unedited = unedited

    def __call__(self, editor: TrainableEditor, batch: StepBatch) -> Measured:
        """Evaluates a batch; the result is differentiable with respect to the editor's parameters."""
        return self.measure(batch, self.update(editor, batch.edit_batch))

    def measure(self, batch: StepBatch, deltas: dict[str, Delta]) -> Measured:
        """Evaluates a batch under given changes: stacks with one entry per edit, or with one entry for all edits."""
        with edited(self.model.layers, deltas):
            features = torch.cat([self.model.features(rows) for rows in batch.row_groups])
        sizes = [len(batch.edit_targets.labels), len(batch.control_targets.labels)]
        edit_features, control_features = features.split(sizes)
        values: list[Tensor] = []
        for name in self.config.constraints:
            if name == "kl":
                values.append(self._kl(batch, control_features))
            else:
                values.append(lp(deltas, self.config.p).sum() / self.config.edits)
        loss = self._edit_loss(batch, edit_features)
        return Measured(loss, torch.stack(values) if values else loss.new_zeros(0))

    def update(self, editor: TrainableEditor, batch: EditBatch) -> dict[str, Delta]:
        """Computes the edits' changes. Each of several updates is computed on the model as the previous one left it."""
        deltas = editor.update(self.model, batch)
        for _ in range(self.config.updates - 1):
            more = editor.update(self.model, batch, under={name: _detached(d) for name, d in deltas.items()})
            deltas = {name: add(delta, more[name]) for name, delta in deltas.items()}
        return deltas

    def _edit_loss(self, batch: StepBatch, features: Tensor) -> Tensor:
        targets, smoothing = batch.edit_targets, self.config.label_smoothing
        scores = self.model.scores(features)
        losses = F.cross_entropy(scores, targets.labels, label_smoothing=smoothing, reduction="none")
        return (losses * targets.weights).sum()

    def _kl(self, batch: StepBatch, features: Tensor) -> Tensor:
        """Computes KL between the unedited and the edited model's distributions at the control inputs.

        The distributions are over classes, over the vocabulary at each answer token, or over the beam's candidates as
        whole answers: Σ p(c) log p(c)/p'(c), where p' comes from the losses of the candidates' tokens.
        """
        targets = batch.control_targets
        unedited = self._unedited(batch)
        if self.config.kl_over == "top1":
            return (kl(self.model.head(unedited), self.model.head(features)) * targets.weights).sum()
        losses = F.cross_entropy(self.model.scores(features), targets.labels, reduction="none")
        return ((unedited[:, 0] * losses + unedited[:, 1]) * targets.weights).sum()

    @torch.no_grad()
    def _unedited(self, batch: StepBatch) -> Tensor:
        if self.unedited is not None:
            return self.unedited.index_select(0, batch.control_targets.unedited_index)
        edit_labels, groups = batch.edit_targets.labels, batch.row_groups
        sizes = [len(rows.target_positions) for rows in groups if rows.target_positions is not None]
        labels = torch.cat([edit_labels, batch.control_targets.labels]).split(sizes)
        kl_over = self.config.kl_over
        outputs = [outputs_of(self.model, rows, own, kl_over) for rows, own in zip(groups, labels, strict=True)]
        return torch.cat(outputs)[len(edit_labels) :]


def _detached(delta: Delta) -> Delta:
    return replace(delta, **{name: tensor.detach() for name, tensor in delta.tensors.items()})
