"""Finds the weights of a model that can be edited, from the model's structure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

from factpatch.errors import ModelError
from factpatch.grouping import keys_by_value


def editable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every linear layer inside the transformer blocks, by the name of its weight.

    Transformers keep their blocks in a ModuleList of modules of one class; embeddings, norms, pooler, classifier and LM
    head lie outside. Only the outermost such lists count, so that a block which contains a list (as in T5) stays whole.
    """
    shared = _position_projections(model)
    layers: dict[str, nn.Module] = {
        f"{prefix}.{name}.weight": layer
        for prefix, blocks in _block_lists(model).items()
        for name, layer in blocks.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer not in shared
    }
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no linear layers inside transformer blocks, so there is nothing to edit; "
            "use a model whose blocks consist of nn.Linear or Conv1D layers"
        )
    if len({id(layer.weight) for layer in layers.values()}) < len(layers):
        raise ModelError(f"{type(model).__name__} shares weights between its blocks; untie them to edit it")
    for name, layer in layers.items():
        if not layer.weight.is_floating_point() or layer.weight.dtype.itemsize < 2:  # such as float8
            raise ModelError(f"{name} is stored as {layer.weight.dtype}; load the model unquantised to edit it")
    return layers


def block_names(layers: Iterable[str]) -> list[str]:
    """Returns the names of the blocks that contain these layers, such as bert.encoder.layer.0, in the model's order."""
    matches = (re.match(r"(.+?\.\d+)\.", name) for name in layers)
    return list(dict.fromkeys(match[1] for match in matches if match))


def feed_forward_weights(model: nn.Module, layers: Iterable[str], blocks: int | None = None) -> dict[str, list[str]]:
    """Returns the feed-forward weights of each block, which are all those outside attention, in the model's order.

    `blocks` limits them to the last few blocks of each stack, such as the encoder's and the decoder's.
    """
    attention = tuple(f"{name}." for name, module in model.named_modules() if "Attention" in type(module).__name__)
    outside = [name for name in layers if not name.startswith(attention)]
    weights = {block: [name for name in outside if name.startswith(f"{block}.")] for block in block_names(outside)}
    stacks = keys_by_value({block: block.rpartition(".")[0] for block in weights})
    return {block: weights[block] for names in stacks.values() for block in names[-(blocks or len(names)) :]}


def _block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not inside and _are_blocks(module):
            lists[name] = module
    return lists


def _are_blocks(modules: nn.ModuleList) -> bool:
    """Returns True if a list holds transformer blocks: modules of one class with more than one linear layer each."""
    one_class = len({type(module) for module in modules}) == 1
    return one_class and sum(isinstance(m, nn.Linear | Conv1D) for m in modules[0].modules()) > 1


def _position_projections(model: nn.Module) -> set[nn.Module]:
    """Returns the layers with which DeBERTa's attention projects its table of relative positions.

    All rows share that table, so these layers cannot run under a different edit for each row.
    """
    projections: set[nn.Module] = set()
    for attention in model.modules():
        if getattr(attention, "relative_attention", False) and hasattr(attention, "pos_att_type"):
            shared = ("query_proj", "key_proj") if getattr(attention, "share_att_key", False) else ()
            names = (*shared, "pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj")
            projections |= {layer for name in names if isinstance(layer := getattr(attention, name, None), nn.Module)}
    return projections
