"""LoRA fine-tuning on one fact with PEFT (Hu et al., 2022): ΔW = (alpha / rank) · B A, with B = 0 at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from factpatch.deltas import LowRank
from factpatch.editors.base import EditMethod, check_above_zero
from factpatch.editors.layer_choice import chosen_layers
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.forced import says_targets
from factpatch.models.rows import in_batches
from factpatch.patch import Patch

EDITS_PER_BATCH = 32
ADAPTER = "default"  # PEFT's name for the only adapter of a model


@dataclass(frozen=True)
class LoRA(EditMethod):
    """Trains one adapter per edit with Adam on ⟨x, a⟩, until the model predicts a.

    PEFT defines the adapters and their initial values. The adapters of a batch are trained side by side, each in its
    own rows of shared forward passes, which gives the same adapters as training them one after the other.
    """

    layers: str = "all"
    rank: int = 8
    alpha: float = 16.0
    lr: float = 1e-3
    steps: int = 100  # maximum
    name = "lora"

    def __post_init__(self) -> None:
        check_above_zero(self, "rank", "alpha", "lr", "steps")

    def edits_per_batch(self, model: TaskModel) -> int:
        return EDITS_PER_BATCH

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return [
            Patch({**deltas}, model.fingerprint, self.name, (edit,))
            for batch in in_batches(model.resolve(edits), EDITS_PER_BATCH)
            for edit, deltas in zip(batch, self._trained(model, batch), strict=True)
        ]

    def _trained(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[dict[str, LowRank]]:
        """Trains one adapter per edit and returns its factors by weight."""
        with _adapter(model, self) as adapted:
            start = {name: _factors(layer) for name, layer in adapted.items()}
        A = {name: one.A.expand(len(edits), -1, -1).clone() for name, one in start.items()}  # (edits, rank, in)
        B = {name: one.B.expand(len(edits), -1, -1).clone() for name, one in start.items()}  # (edits, rank, out)
        parameters = [*A.values(), *B.values()]
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        scale = self.alpha / self.rank
        targets = [edit.a for edit in edits]
        rows = model.rows([edit.x for edit in edits], targets)
        finished: list[dict[str, LowRank] | None] = [None] * len(edits)

        def changes() -> dict[str, LowRank]:
            return {name: LowRank(A[name], scale * B[name]) for name in A}

        def keep(done: Sequence[bool]) -> None:
            stacks = changes()
            for e, is_done in enumerate(done):
                if is_done:
                    finished[e] = {name: LowRank(d.A[e].clone(), d.B[e].clone()) for name, d in stacks.items()}

        for _ in range(self.steps):
            with edited(model.layers, changes()):
                keep(says_targets(model, rows, targets, [own is None for own in finished]))
            if None not in finished:
                break
            with torch.enable_grad():
                for parameter in parameters:
                    parameter.requires_grad_(True)
                with edited(model.layers, changes()):
                    # Each edit has its own factors, so the gradient of the sum is each edit's own gradient.
                    loss = model.losses(rows).sum()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.requires_grad_(False).grad = gradient
            optimizer.step()
        keep([own is None for own in finished])
        trained = [own for own in finished if own is not None]
        stacks = {
            name: LowRank(torch.stack([own[name].A for own in trained]), torch.stack([own[name].B for own in trained]))
            for name in A
        }
        with edited(model.layers, stacks):
            finite = model.losses(rows).isfinite().tolist()
        for edit, is_finite in zip(edits, finite, strict=True):
            if not is_finite:
                raise InputError(f"LoRA fine-tuning diverged for {edit.x!r}: the loss is not finite; lower lr")
        return trained


def _factors(layer: Any) -> LowRank:
    """Returns copies of an adapter's factors, without its scale."""
    A, B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight  # (rank, in), (out, rank)
    dtype = torch.promote_types(A.dtype, torch.float32)
    return LowRank(A.detach().to(dtype, copy=True), B.detach().mT.to(dtype, copy=True))


@contextmanager
def _adapter(model: TaskModel, method: LoRA) -> Iterator[Mapping[str, nn.Module]]:
    """Puts a new adapter into the model for a `with` block. Yields the adapted layers by the names of their weights."""
    try:
        from peft import LoraConfig, LoraModel
    except ImportError:
        raise InputError("the method lora needs PEFT; install it with pip install 'factpatch[peft]'") from None
    layers = chosen_layers(model, method.layers)
    paths = {name: name.removesuffix(".weight") for name in layers}
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,  # pyright: ignore[reportArgumentType] (a float works, too)
        target_modules=list(paths.values()),
        fan_in_fan_out=not all(isinstance(layer, nn.Linear) for layer in layers.values()),  # Conv1D
    )
    network = model.model
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)  # every edit starts from the same A
        tuner = LoraModel(network, config, ADAPTER)
    try:
        yield {name: network.get_submodule(path) for name, path in paths.items()}
    finally:
        tuner.unload()
        vars(network).pop("peft_config", None)
        network.requires_grad_(False)
