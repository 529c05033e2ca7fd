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
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import Rows, TaskModel
from factpatch.models.forced import token_accuracy
from factpatch.patch import Patch

ADAPTER = "default"  # PEFT's name for the only adapter of a model


@dataclass(frozen=True)
class LoRA(EditMethod):
    """Trains an adapter with Adam on ⟨x, a⟩ until the model predicts a, one edit after the other."""

    layers: str = "all"
    rank: int = 8
    alpha: float = 16.0
    lr: float = 1e-3
    steps: int = 100  # maximum
    name = "lora"

    def __post_init__(self) -> None:
        check_above_zero(self, "rank", "alpha", "lr", "steps")

    def edits_per_batch(self, model: TaskModel) -> int:
        return 8  # for running the edited models; adapters are trained one by one

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return [self._patch(model, edit) for edit in model.resolve(edits)]

    def _patch(self, model: TaskModel, edit: FactEdit) -> Patch:
        rows = model.rows([edit.x], [edit.a])
        with _adapter(model, self) as adapted:
            parameters = [p for layer in adapted.values() for p in layer.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(parameters, lr=self.lr)
            for _ in range(self.steps):
                if _says(model, rows, edit.a):
                    break
                with torch.enable_grad():
                    loss = model.losses(rows).sum()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            deltas = {name: _factors(layer) for name, layer in adapted.items()}
            with torch.no_grad():
                if not model.losses(rows).isfinite().all():
                    raise InputError(f"LoRA fine-tuning diverged for {edit.x!r}: the loss is not finite; lower lr")
        return Patch({**deltas}, model.fingerprint, self.name, (edit,))


@torch.no_grad()
def _says(model: TaskModel, rows: Rows, target: str) -> bool:
    """Returns True if the model gives the target.

    To save time, a decoder generates only once each token of the target is the most likely one.
    """
    if model.kind == "causal" and token_accuracy(model, rows).item() < 1:
        return False
    return same(model.decide(rows)[0][0], target)


def _factors(layer: Any) -> LowRank:
    A, B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight  # (rank, in), (out, rank)
    return LowRank(A.detach().clone(), (layer.scaling[ADAPTER] * B.detach().mT).contiguous())


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
