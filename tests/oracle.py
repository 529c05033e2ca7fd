"""The update as the paper writes it: dense, one edit at a time, from the weights' own gradients. Slow and obvious."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from factpatch.editors.hypernetwork import HyperNetwork
from factpatch.editors.network import WeightNormLinears
from factpatch.facts import FactEdit
from factpatch.models import TaskModel


def dense_update(editor: HyperNetwork, model: TaskModel, edit: FactEdit) -> dict[str, Tensor]:
    """ΔW (out × in) of every edited weight, differentiable in the editor's parameters."""
    gradients = weight_gradients(model, edit)
    h = read_fact(editor, model, edit)
    update = {}
    for key, names in editor.weights_of.items():
        group = editor.groups[key]
        for i, name in enumerate(names):
            out, in_ = editor.shapes[name]
            predicted = (
                weight_normed(group.up, i) @ torch.tanh(weight_normed(group.down, i) @ h + group.down.b[i])
                + group.up.b[i]
            )
            r, a, r_bias, a_bias, eta = predicted.split([out, in_, out, in_, 1])
            first = torch.outer(r.softmax(0), a) * gradients[name]
            second = torch.outer(r_bias.softmax(0), a_bias)
            update[name] = editor.config.max_scale * eta.sigmoid() * (first + second)
    return update


def weight_gradients(model: TaskModel, edit: FactEdit) -> dict[str, Tensor]:
    weights = {name: layer.weight for name, layer in model.layers.items()}
    with torch.enable_grad():
        for weight in weights.values():
            weight.requires_grad_(True)
        loss = model.losses(model.rows([edit.x], [edit.a])).sum()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for weight in weights.values():
            weight.requires_grad_(False)
    return {
        name: g if isinstance(model.layers[name], nn.Linear) else g.T
        for name, g in zip(weights, gradients, strict=True)
    }


def read_fact(editor: HyperNetwork, model: TaskModel, edit: FactEdit) -> Tensor:
    encoder = editor.fact_encoder
    ids = torch.tensor(model.tokenizer(f"{edit.y} >> {edit.a} || {edit.x}")["input_ids"]).to(model.device)
    ends = []
    for lstm, text in ((encoder.forwards, ids), (encoder.backwards, ids.flip(0))):
        _, (last, _) = lstm(encoder.embedding(text)[None])
        ends.append(last[0, 0])
    return torch.tanh(encoder.out(torch.cat(ends)))


def weight_normed(layers: WeightNormLinears, i: int) -> Tensor:
    return layers.g[i][:, None] * layers.v[i] / layers.v[i].norm(dim=1, keepdim=True)


@contextmanager
def with_weights(model: TaskModel, update: dict[str, Tensor]) -> Iterator[None]:
    """The model with the update added into its weights."""
    kept = {name: model.layers[name].weight.clone() for name in update}
    try:
        with torch.no_grad():
            for name, delta in update.items():
                layer = model.layers[name]
                layer.weight += delta if isinstance(layer, nn.Linear) else delta.T
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                model.layers[name].weight.copy_(weight)
