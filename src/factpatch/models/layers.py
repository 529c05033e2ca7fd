"""Which weights of a model may be edited, read off its structure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

from factpatch.errors import ModelError


def editable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer inside the transformer blocks, by the name of its weight.

    Transformers keep their blocks in a ModuleList of modules of one class; embeddings, norms, pooler, classifier and LM
    head lie outside. The outermost such lists are taken, so that a block with a list inside (T5's) stays whole.
    """
    layers: dict[str, nn.Module] = {
        f"{prefix}.{name}.weight": layer
        for prefix, blocks in _block_lists(model).items()
        for name, layer in blocks.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no linear layers inside transformer blocks, so there is nothing to edit; "
            "use a model whose blocks are made of nn.Linear or Conv1D"
        )
    if len({id(layer.weight) for layer in layers.values()}) < len(layers):
        raise ModelError(f"{type(model).__name__} ties weights of its blocks to each other; untie them to edit it")
    for name, layer in layers.items():
        if not layer.weight.is_floating_point():
            raise ModelError(f"{name} is stored as {layer.weight.dtype}; load the model unquantised to edit it")
    return layers


def block_names(layers: Iterable[str]) -> list[str]:
    """The blocks that editable layers lie in, in the model's order, such as bert.encoder.layer.0."""
    found = (re.match(r"(.+?\.\d+)\.", name) for name in layers)
    return list(dict.fromkeys(match[1] for match in found if match))


def _block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside and _are_blocks(module):
            found[name] = module
    return found


def _are_blocks(modules: nn.ModuleList) -> bool:
    """Blocks are alike, and hold an attention beside their other layers: more linear layers than one."""
    one_class = len({type(module) for module in modules}) == 1
    return one_class and sum(isinstance(m, nn.Linear | Conv1D) for m in modules[0].modules()) > 1
