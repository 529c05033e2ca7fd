"""Chooses a baseline's settings: the block to fine-tune, and the bound on its weights' changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from factpatch.data.revisions import Revision, editable
from factpatch.editors import BOUNDS, FineTune, Zhu
from factpatch.evaluation.measure import measure, predicted_now
from factpatch.metrics import summary
from factpatch.models import TaskModel
from factpatch.models.layers import block_names
from factpatch.processes import broadcast_from_first

SELECT_EDITS, SELECT_INPUTS = 50, 200  # edits and control inputs that each choice is measured on


def select(
    model: TaskModel,
    layers: str,
    bounded: bool,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda tried: None,
) -> tuple[FineTune, list[dict[str, Any]]]:
    """Finds the block (if `layers` is "block"), then the bound, with the highest success + retain.

    Returns the baseline with these settings, and all settings that were tried.
    """
    tried: list[dict[str, Any]] = []
    edits = editable(model, predicted_now(model, edits[:SELECT_EDITS]))
    others = predicted_now(model, others[:SELECT_INPUTS])

    def best_of(choices: Sequence[tuple[str, float | None]]) -> tuple[str, float | None]:
        for block, bound in choices:
            rates = summary(measure(_baseline(block, bound), model, edits, others))
            tried.append({"layers": block, "bound": bound, "success": rates["success"], "retain": rates["retain"]})
            on_done(1)
        scores = [(one["success"] or 0) + (one["retain"] or 0) for one in tried[-len(choices) :]]
        return choices[scores.index(max(scores))]

    block = best_of([(name, None) for name in block_names(model.layers)])[0] if layers == "block" else layers
    bound = best_of([(block, bound) for bound in BOUNDS])[1] if bounded else None
    block, bound, tried = broadcast_from_first((block, bound, tried))
    return _baseline(block, bound), tried


def count_choices(model: TaskModel, layers: str, bounded: bool) -> int:
    """Returns how many settings `select` tries."""
    return (len(block_names(model.layers)) if layers == "block" else 0) + (len(BOUNDS) if bounded else 0)


def _baseline(layers: str, bound: float | None) -> FineTune:
    return FineTune(layers) if bound is None else Zhu(layers, bound=bound)
