"""Baselines: fine-tuning on one fact, freely or within bounds (Zhu et al., 2020), and a single gradient step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from factpatch.deltas import Dense, LowRank
from factpatch.editors.base import EditMethod, split_stacks
from factpatch.editors.layer_choice import chosen_layers
from factpatch.engine import capture, edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.forced import says_targets
from factpatch.models.rows import in_batches
from factpatch.patch import Patch, weight_shape

BOUNDS = (1e-3, 5e-4, 1e-4, 5e-5, 1e-5)  # bounds that De Cao et al. (2021) tried for Zhu et al.
MEMORY = {"cpu": 2 << 30, "cuda": 24 << 30}  # bytes for the tensors of all edits in a batch
MAX_EDITS_PER_BATCH = 32


@dataclass(frozen=True)
class FineTune(EditMethod):
    """Runs RMSprop on ⟨x, a⟩ until the model predicts a. Patches are dense.

    The edits of a batch share forward passes, each with its own change. Edits that have succeeded stay unchanged.
    """

    layers: str = "all"  # all, or one block such as bert.encoder.layer.0
    lr: float = 1e-5
    steps: int = 100  # maximum
    bound: ClassVar[float | None] = None
    name = "finetune"

    def edits_per_batch(self, model: TaskModel) -> int:
        # Four tensors of four bytes per value: the change, its gradient, RMSprop's mean square and a copy.
        values = sum(out * in_ for out, in_ in map(weight_shape, chosen_layers(model, self.layers).values()))
        return max(1, min(MAX_EDITS_PER_BATCH, MEMORY.get(model.device.type, MEMORY["cpu"]) // (16 * values)))

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {"layers": self.layers, "bound": self.bound}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        batches = in_batches(model.resolve(edits), self.edits_per_batch(model))
        return [patch for batch in batches for patch in self._propose_batch(model, batch)]

    def _propose_batch(self, model: TaskModel, edits: list[FactEdit]) -> list[Patch]:
        layers = chosen_layers(model, self.layers)
        like = {"device": model.device, "dtype": torch.promote_types(model.model.dtype, torch.float32)}
        changes = {
            name: torch.zeros(len(edits), *weight_shape(layer), **like, requires_grad=True)
            for name, layer in layers.items()
        }
        optimizer = torch.optim.RMSprop(list(changes.values()), lr=self.lr)
        targets = [edit.a for edit in edits]
        rows = model.rows([edit.x for edit in edits], targets)
        failed = [True] * len(edits)
        for _ in range(self.steps):
            with edited(layers, {name: Dense(change) for name, change in changes.items()}):
                said = says_targets(model, rows, targets, failed)
                failed = [still and not now for still, now in zip(failed, said, strict=True)]
                if not any(failed):
                    break
                with torch.enable_grad():
                    # Each edit has its own weights, so the gradient of the sum is each edit's own gradient.
                    gradients = torch.autograd.grad(model.losses(rows).sum(), list(changes.values()))
            pending = torch.tensor(failed, device=model.device)[:, None, None]
            for change, gradient in zip(changes.values(), gradients, strict=True):
                # RMSprop does not move weights whose gradient is zero, so edits that have succeeded stay as they are.
                change.grad = gradient.where(pending, 0.0)
            optimizer.step()
            for change in changes.values():
                change.grad = None
                if self.bound is not None:
                    change.clamp_(-self.bound, self.bound)
        finite = torch.stack([change.isfinite().flatten(1).all(1) for change in changes.values()]).all(0)  # (edits,)
        for edit, is_finite in zip(edits, finite.tolist(), strict=True):
            if not is_finite:
                raise InputError(f"fine-tuning diverged for {edit.x!r}: weights are not finite; lower lr")
        return [
            Patch({n: Dense(c[e].clone()) for n, c in changes.items()}, model.fingerprint, self.name, (edit,))
            for e, edit in enumerate(edits)
        ]


@dataclass(frozen=True)
class Zhu(FineTune):
    """Fine-tuning that projects every weight back to within ±bound of its original value after each step."""

    bound: float = field(kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride] (a field here)
    name = "zhu"


@dataclass(frozen=True)
class GradientStep(EditMethod):
    """One plain gradient step on ⟨x, a⟩, a reference to compare other methods' updates with."""

    layers: str = "all"
    lr: float = 1e-2
    name = "gradient"

    def edits_per_batch(self, model: TaskModel) -> int:
        return MAX_EDITS_PER_BATCH

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {"layers": self.layers}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        layers = chosen_layers(model, self.layers)
        patches: list[Patch] = []
        for batch in in_batches(model.resolve(edits), MAX_EDITS_PER_BATCH):
            rows = model.rows([edit.x for edit in batch], [edit.a for edit in batch])
            traces = capture(layers, lambda rows=rows: model.losses(rows))
            steps = {name: LowRank(trace.X, -self.lr * trace.D) for name, trace in traces.items()}
            patches += split_stacks(steps, batch, model.fingerprint, self.name)
        return patches
