"""Parses a user's choice of the layers that a method changes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from factpatch.errors import InputError
from factpatch.models import TaskModel
from factpatch.models.layers import block_names, feed_forward_weights


def chosen_layers(model: TaskModel, choice: str) -> dict[str, nn.Module]:
    """Returns the editable layers that `choice` names.

    `choice` is "all", a block such as bert.encoder.layer.0, a pattern such as `*.mlp` or `*.fc2`, "mlp" for all
    feed-forward weights, or "mlp:3" for those of the last three blocks of each stack.
    """
    kind, _, number = choice.partition(":")
    if choice == "all":
        return model.layers
    if kind == "mlp" and (not number or (number.isdecimal() and int(number) > 0)):
        by_block = feed_forward_weights(model.model, model.layers, int(number) if number else None)
        return {name: model.layers[name] for names in by_block.values() for name in names}
    layers = {
        name: layer
        for name, layer in model.layers.items()
        if fnmatchcase(name, choice) or fnmatchcase(name, f"{choice}.*")  # the weight itself, or what contains it
    }
    if not layers:
        known = ", ".join(block_names(model.layers))
        raise InputError(
            f"no editable weight matches {choice}, one is called {next(iter(model.layers))}; "
            f"choose all, mlp, a pattern, or a block: {known}"
        )
    return layers
