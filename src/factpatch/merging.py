"""Merging: many patches, each made for its own facts, solved into one joint patch.

Patches must not simply be added: each one also changes what the model does elsewhere, and these side effects pile up.
For one weight, let K (tokens × in) hold the layer's inputs at the tokens of all edits, on the unedited model, and V
(tokens × out) what each edit's own patch adds there. With C the mean of k kᵀ over the layer's inputs for ordinary
texts, the merged change does the same at the edits' tokens and as little as possible elsewhere:

    S = argmin Σ ‖S k − v‖² + λ N tr(S C Sᵀ) = Vᵀ K (KᵀK + λ N C)⁻¹          (N edits, ridge λ)

This closed form does not depend on the order of the patches, and removing one gives the same merge as never adding it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Literal, get_args

from factpatch.covariance import Covariance, check_ridge
from factpatch.deltas import scaled
from factpatch.errors import InputError
from factpatch.facts import FactEdit, normalize, same
from factpatch.models import TaskModel
from factpatch.patch import Patch, unpatched
from factpatch.solving import Problem, solve_in_sequence, solve_independently

Mode = Literal["unedited", "sequence"]
MODES = get_args(Mode)
RIDGE = 1.0
MERGED = ", merged"  # suffix of a merged patch's method name
SCALES = tuple(0.1 ** (1 - k / 15) for k in range(16))  # fractions of a patch to try, from 0.1 to 1
MARGIN = 1.25  # factor on the smallest fraction that succeeds


def merge(
    model: TaskModel,
    patches: Sequence[Patch],
    others: Iterable[str] | None = None,
    *,
    ridge: float | Mapping[str, float] | None = None,
    covariance: Covariance | None = None,
    mode: Mode = "unedited",
) -> Patch:
    """Merges patches, made by any methods, into one patch with all of their facts.

    `others` is a sample of ordinary inputs whose answers should stay as they are. A `covariance` computed
    from such a sample can be given instead. `ridge` is λ, for all weights or by weight name: larger values protect
    other answers better, smaller ones the edits.

    In the mode "unedited", all weights are solved independently, from the layers' inputs in the unedited model. In
    "sequence" they are solved one layer after another, each from its inputs in the model as merged so far. That takes
    two forward passes per layer, and retains more facts if the editor was not trained for merging.
    """
    check_mergeable(model, patches)
    ridges = _ridges(model, mean_ridge(patch.ridge for patch in patches) if ridge is None else ridge)
    check_settings(ridges.values(), mode)
    with unpatched(model):
        if covariance is None:
            covariance = Covariance.compute(model, others or ())
        covariance.check_fits(model)
        problem = Problem.of(model, canonical(patches), covariance, ridges)
        solved = solve_in_sequence(problem) if mode == "sequence" else solve_independently(problem)
    deltas = {name: solved[name] for name in model.layers if name in solved}
    edits = sorted({edit for patch in patches for edit in patch.edits}, key=edit_key)
    return Patch(deltas, model.fingerprint, merged_name(patch.method for patch in patches), tuple(edits))


def merged_name(methods: Iterable[str]) -> str:
    """Returns the method name of a merged patch, such as "finetune+hyper, merged"."""
    return "+".join(sorted({name for method in methods for name in method.partition(MERGED)[0].split("+")})) + MERGED


def mean_ridge(ridges: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the geometric mean of the ridges that methods have learned, by weight."""
    by_weight: dict[str, list[float]] = {}
    for ridge in ridges:
        for name, value in ridge.items():
            by_weight.setdefault(name, []).append(value)
    return {name: geometric_mean(values) for name, values in by_weight.items()}


def check_settings(ridges: Iterable[float], mode: str) -> None:
    """Raises an InputError for an invalid ridge or mode."""
    for ridge in ridges:
        check_ridge(ridge)
    if mode not in MODES:
        raise InputError(f"expected a mode among {', '.join(MODES)}, found {mode!r}")


def check_mergeable(model: TaskModel, patches: Sequence[Patch]) -> None:
    """Raises an error for patches of other models and for facts that contradict each other."""
    if not patches:
        raise InputError("expected patches to merge, found none; give at least one")
    for patch in patches:
        patch.check_fits(model)
        if not patch.edits:
            raise InputError("expected patches that name their edits, found one without; make it again")
    check_conflicts(edit for patch in patches for edit in patch.edits)


def check_conflicts(edits: Iterable[FactEdit]) -> None:
    """Raises an InputError if one input is to get two different answers."""
    wanted: dict[str, FactEdit] = {}
    for edit in edits:
        first = wanted.setdefault(normalize(edit.x), edit)
        if not same(first.a, edit.a):
            raise InputError(
                f"two edits contradict each other: {first.x!r} to {first.a!r} and {edit.x!r} to {edit.a!r}; "
                "leave one of them out"
            )


def canonical(patches: Sequence[Patch]) -> list[Patch]:
    """Sorts patches by their content, so that rounding does not depend on the order in which they were given."""
    keys = {id(patch): "\n".join(map(edit_key, patch.edits)) for patch in patches}
    # Patches of the same edits are sorted by a hash of their content, which takes time for large patches.
    ambiguous = len(set(keys.values())) < len(patches)
    return sorted(patches, key=lambda patch: (keys[id(patch)], patch.content_hash if ambiguous else ""))


def edit_key(edit: FactEdit) -> str:
    """Returns the key by which edits are sorted before they are merged."""
    return repr((edit.x, edit.a, edit.y))


def _ridges(model: TaskModel, ridge: float | Mapping[str, float]) -> dict[str, float]:
    by_weight = ridge if isinstance(ridge, Mapping) else dict.fromkeys(model.layers, ridge)
    if unknown := next((name for name in by_weight if name not in model.layers), None):
        raise InputError(f"the ridge names {unknown}, which is not an editable weight of this model")
    return {name: float(by_weight.get(name, RIDGE)) for name in model.layers}


# The smallest sufficient patch


def smallest_part(model: TaskModel, patches: Sequence[Patch]) -> list[Patch]:
    """Scales each patch down to `MARGIN` times the smallest fraction at which all of its edits still succeed.

    A patch that fails at full size, or at the chosen fraction, is left unchanged.
    """

    def succeed(fractions: Mapping[int, float]) -> dict[int, bool]:
        """Returns whether each patch, given by its index, succeeds at the given fraction of its size."""
        tried = {i: scaled_patch(patches[i], fraction) for i, fraction in fractions.items()}
        asked = [(i, edit) for i in tried for edit in patches[i].edits]
        answers = model.predict_patched([tried[i] for i, _ in asked], [edit.x for _, edit in asked])
        failed = {i for (i, edit), answer in zip(asked, answers, strict=True) if not same(answer, edit.a)}
        return {i: i not in failed for i in fractions}

    # A binary search for each patch, all in the same batches: low fails, high succeeds.
    whole = succeed(dict.fromkeys(range(len(patches)), 1.0))
    bounds = {i: (-1, len(SCALES) - 1) for i, success in whole.items() if success}
    while middles := {i: (low + high) // 2 for i, (low, high) in bounds.items() if high - low > 1}:
        for i, success in succeed({i: SCALES[middle] for i, middle in middles.items()}).items():
            low, high = bounds[i]
            bounds[i] = (low, middles[i]) if success else (middles[i], high)
    chosen = {i: min(1.0, SCALES[high] * MARGIN) for i, (_, high) in bounds.items()}
    confirmed = succeed({i: fraction for i, fraction in chosen.items() if fraction < 1})
    return [scaled_patch(patch, chosen[i]) if confirmed.get(i) else patch for i, patch in enumerate(patches)]


def scaled_patch(patch: Patch, factor: float) -> Patch:
    return replace(patch, deltas={name: scaled(delta, factor) for name, delta in patch.deltas.items()})
