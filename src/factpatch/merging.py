"""Merging: many patches, each made for its own facts, solved into one joint patch.

Patches must not simply be added: each one also changes what the model does elsewhere, and these side effects pile up.
For one weight, let K (tokens × in) hold the layer's inputs at the tokens of all edits, on the unedited model, and V
(tokens × out) what each edit's own patch adds there. With C the mean of k kᵀ over the layer's inputs for ordinary
texts, the merged change does the same at the edits' tokens and as little as possible elsewhere:

    S = argmin Σ ‖S k − v‖² + λ N tr(S C Sᵀ) = Vᵀ K (KᵀK + λ N C)⁻¹          (N edits, ridge λ)

This closed form does not depend on the order of the patches, and removing one gives the same merge as never adding it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, get_args

from factpatch.covariance import Covariance
from factpatch.deltas import scaled
from factpatch.errors import InputError
from factpatch.facts import FactEdit, normalize, same
from factpatch.models import TaskModel
from factpatch.patch import Patch, hash_tensors, set_patches
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
        found = solve_in_sequence(problem) if mode == "sequence" else solve_independently(problem)
    deltas = {name: found[name] for name in model.layers if name in found}
    edits = sorted({edit for patch in patches for edit in patch.edits}, key=edit_key)
    return Patch(deltas, model.fingerprint, merged_name(patch.method for patch in patches), tuple(edits))


def merged_name(methods: Iterable[str]) -> str:
    """Returns the method name of a merged patch, such as "finetune+hyper, merged"."""
    return "+".join(sorted({name for method in methods for name in method.partition(MERGED)[0].split("+")})) + MERGED


def mean_ridge(ridges: Iterable[Mapping[str, float]]) -> dict[str, float] | None:
    """Returns the geometric mean of the ridges that methods have learned, by weight; None if there are none."""
    found = [ridge for ridge in ridges if ridge]
    if not found:
        return None
    names = dict.fromkeys(name for ridge in found for name in ridge)
    logs = {name: [math.log(ridge[name]) for ridge in found if name in ridge] for name in names}
    return {name: math.exp(sum(values) / len(values)) for name, values in logs.items()}


def check_settings(ridges: Iterable[float], mode: str) -> None:
    """Raises an InputError for an invalid ridge or mode."""
    for ridge in ridges:
        if not 0 < ridge < float("inf"):
            raise InputError(f"expected a ridge above 0, found {ridge}; values between 0.01 and 1 are usual")
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
    keys = {id(patch): "\n".join(edit_key(edit) for edit in patch.edits) for patch in patches}
    ambiguous = len(set(keys.values())) < len(patches)

    def content(patch: Patch) -> str:
        """Tells apart patches of the same edits; hashing large patches is slow, and seldom needed."""
        if not ambiguous:
            return ""
        return hashlib.sha256(f"{patch.method} {hash_tensors(patch.tensors())}".encode()).hexdigest()

    return sorted(patches, key=lambda patch: (keys[id(patch)], content(patch)))


def edit_key(edit: FactEdit) -> str:
    """Returns the key by which edits are sorted before they are merged."""
    return repr((edit.x, edit.a, edit.y))


def _ridges(model: TaskModel, ridge: float | Mapping[str, float] | None) -> dict[str, float]:
    given = ridge if isinstance(ridge, Mapping) else dict.fromkeys(model.layers, RIDGE if ridge is None else ridge)
    if unknown := next((name for name in given if name not in model.layers), None):
        raise InputError(f"the ridge names {unknown}, which is not an editable weight of this model")
    return {name: float(given.get(name, RIDGE)) for name in model.layers}


@contextmanager
def unpatched(model: TaskModel) -> Iterator[None]:
    """Reverts all patches of the model for a `with` block and applies them again afterwards."""
    with model.lock:
        applied = model.patches
        set_patches(model, [])
        try:
            yield
        finally:
            set_patches(model, applied)


# The smallest sufficient patch


def smallest_part(
    model: TaskModel,
    patches: Sequence[Patch],
    paraphrases: Sequence[Sequence[str]] | None = None,
    margin: float = MARGIN,
) -> list[Patch]:
    """Scales each patch down to `margin` times the smallest fraction that still succeeds, but never up.

    A fraction succeeds if every edit of the patch gets its target, and each of the patch's `paraphrases` the target of
    the first edit. A patch that fails at full size, or at the fraction found, is left unchanged.
    """
    if margin < 1:
        raise InputError(f"expected a margin of at least 1, found {margin}")
    extra = paraphrases or [()] * len(patches)
    wanted = [
        [*((edit.x, edit.a) for edit in patch.edits), *((text, patch.edits[0].a) for text in texts)]
        for patch, texts in zip(patches, extra, strict=True)
    ]

    def succeed(parts: Mapping[int, float]) -> dict[int, bool]:
        tried = {i: scaled_patch(patches[i], part) for i, part in parts.items()}
        asked = [(i, text, target) for i in tried for text, target in wanted[i]]
        answers = model.predict_patched([tried[i] for i, _, _ in asked], [text for _, text, _ in asked])
        failed = {i for (i, _, target), answer in zip(asked, answers, strict=True) if not same(answer, target)}
        return {i: i not in failed for i in parts}

    last = len(SCALES) - 1
    bounds = {i: (-1, last) for i, fine in succeed(dict.fromkeys(range(len(patches)), 1.0)).items() if fine}
    while open_ := {i: (low + high) // 2 for i, (low, high) in bounds.items() if high - low > 1}:
        for i, fine in succeed({i: SCALES[k] for i, k in open_.items()}).items():
            low, high = bounds[i]
            bounds[i] = (low, open_[i]) if fine else (open_[i], high)
    chosen = {i: min(1.0, SCALES[high] * margin) for i, (_, high) in bounds.items()}
    fine = succeed({i: part for i, part in chosen.items() if part < 1})
    return [scaled_patch(patch, chosen[i]) if fine.get(i) else patch for i, patch in enumerate(patches)]


def scaled_patch(patch: Patch, part: float) -> Patch:
    return replace(patch, deltas={name: scaled(delta, part) for name, delta in patch.deltas.items()})
