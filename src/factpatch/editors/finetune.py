"""The baselines: fine-tuning on one fact, freely or within bounds (Zhu et al., 2020), and a single gradient step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factpatch.deltas import Delta, Dense, LowRank
from factpatch.editors.base import EditMethod
from factpatch.engine import capture, edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import Rows, TaskModel
from factpatch.models.layers import block_names
from factpatch.patch import Patch, weight_shape

BOUNDS = (1e-3, 5e-4, 1e-4, 5e-5, 1e-5)  # the paper's choices for Zhu et al.
MEMORY = {"cpu": 2 << 30, "cuda": 24 << 30}  # bytes that edits made side by side may take
MOST_AT_ONCE = 32


@dataclass(frozen=True)
class FineTune(EditMethod):
    """RMSprop on ⟨x, a⟩ until the model says a; patches are dense.

    Edits run side by side, each with a change of its own. An edit that has succeeded is not changed any further.
    """

    layers: str = "all"  # or one block, such as bert.encoder.layer.0
    lr: float = 1e-5
    steps: int = 100  # at most
    bound: ClassVar[float | None] = None

    @property
    def name(self) -> str:
        return "finetune"

    def at_once(self, model: TaskModel) -> int:
        return at_once(model, chosen_layers(model, self.layers), tensors=4)  # change, gradient, its square, a copy

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {"layers": self.layers, "bound": self.bound}

    @torch.inference_mode(False)
    @torch.no_grad()
    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        edits = model.resolve(edits)
        layers = chosen_layers(model, self.layers)
        size = self.at_once(model)
        patches: list[Patch] = []
        for start in range(0, len(edits), size):
            patches += self._propose_batch(model, layers, edits[start : start + size])
        return patches

    def _propose_batch(self, model: TaskModel, layers: Mapping[str, nn.Module], edits: list[FactEdit]) -> list[Patch]:
        shapes = {name: (len(edits), *weight_shape(layer)) for name, layer in layers.items()}
        dtype = torch.promote_types(model.model.dtype, torch.float32)
        changes = {name: torch.zeros(shape, device=model.device, dtype=dtype) for name, shape in shapes.items()}
        optimizer = torch.optim.RMSprop(list(changes.values()), lr=self.lr)
        rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
        for _ in range(self.steps):
            with edited(layers, {name: Dense(change) for name, change in changes.items()}):
                said = [ranked[0] for ranked in model.decide(rows, edits=len(edits))]
                failed = [not same(text, edit.a) for text, edit in zip(said, edits, strict=True)]
                if not any(failed):
                    break
                gradients = self._gradients(model, rows, changes)
            going = torch.tensor(failed, device=model.device)[:, None, None]
            for change, gradient in zip(changes.values(), gradients, strict=True):
                change.grad = gradient.where(going, 0.0)
            # A gradient of nothing moves nothing, so an edit that has taken stays as it is.
            optimizer.step()
            for change in changes.values():
                change.grad = None
                if self.bound is not None:
                    change.clamp_(-self.bound, self.bound)
        finite = torch.stack([change.isfinite().flatten(1).all(1) for change in changes.values()]).all(0)  # (edits,)
        for edit, is_finite in zip(edits, finite.tolist(), strict=True):
            if not is_finite:
                raise InputError(f"fine-tuning ended in weights that are not finite, for {edit.x!r}; lower lr")
        return [
            Patch({n: Dense(c[e].clone()) for n, c in changes.items()}, model.fingerprint, self.name, (edit,))
            for e, edit in enumerate(edits)
        ]

    @staticmethod
    def _gradients(model: TaskModel, rows: Rows, changes: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            for change in changes.values():
                change.requires_grad_(True)
            # Summed over edits, each of which has weights of its own: every gradient is that of its edit alone.
            gradients = torch.autograd.grad(model.losses(rows).sum(), list(changes.values()))
        for change in changes.values():
            change.requires_grad_(False)
        return gradients


@dataclass(frozen=True)
class Zhu(FineTune):
    """Fine-tuning that keeps every weight within ±bound of its original value (Zhu et al., 2020).

    The change is projected back after each step.
    """

    bound: float = field(kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride] (a field here)

    @property
    def name(self) -> str:
        return "zhu"


@dataclass(frozen=True)
class GradientStep(EditMethod):
    """One plain step down the gradient of ⟨x, a⟩, to compare other updates with."""

    layers: str = "all"
    lr: float = 1e-2

    @property
    def name(self) -> str:
        return "gradient"

    def at_once(self, model: TaskModel) -> int:
        return MOST_AT_ONCE

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {"layers": self.layers}

    @torch.inference_mode(False)
    @torch.no_grad()
    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        edits = model.resolve(edits)
        layers = chosen_layers(model, self.layers)
        patches: list[Patch] = []
        for start in range(0, len(edits), MOST_AT_ONCE):
            batch = edits[start : start + MOST_AT_ONCE]
            traces = capture(layers, lambda b=batch: model.losses(model.rows([e.x for e in b], [e.a for e in b])))
            for i, edit in enumerate(batch):
                deltas: dict[str, Delta] = {n: LowRank(t.X[i].clone(), -self.lr * t.D[i]) for n, t in traces.items()}
                patches.append(Patch(deltas, model.fingerprint, self.name, (edit,)))
        return patches


def chosen_layers(model: TaskModel, choice: str) -> dict[str, nn.Module]:
    """All editable layers, or those of one block."""
    if choice == "all":
        return model.layers
    found = {name: layer for name, layer in model.layers.items() if name.startswith(f"{choice}.")}
    if not found:
        known = ", ".join(block_names(model.layers))
        raise InputError(f"the model has no block {choice!r}; choose all, or one of {known}")
    return found


def at_once(model: TaskModel, layers: Mapping[str, nn.Module], tensors: int) -> int:
    """How many dense edits fit side by side, with so many tensors of a change's size each."""
    values = sum(out * in_ for out, in_ in map(weight_shape, layers.values()))
    return max(1, min(MOST_AT_ONCE, MEMORY.get(model.device.type, MEMORY["cpu"]) // (4 * tensors * values)))
