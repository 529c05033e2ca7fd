"""Draws the revisions, paraphrases and control inputs of each training step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from factpatch.data.revisions import Revision, own_forms
from factpatch.data.targets import Texts
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.training.config import TrainConfig

Indices = NDArray[np.int64]

SMALLEST_POOL = 64  # control inputs, so that each edit finds one that is not one of its own forms

# These numbers make the seeds of a run's random streams different.
STEP, EPOCH, POOL, NEAR = 0, 1, 2, 3


@dataclass(frozen=True)
class Plan:
    """The random choices of one step, or of a part of one. Revisions are given by their index."""

    edited: Indices  # (edits,)  revisions to edit
    targets: Indices  # (edits,)  index of the wanted answer among each revision's targets of all kinds
    paraphrases: Indices  # (edits, paraphrases)  index among the revision's paraphrases; -1 for the input itself
    controls: Indices  # (edits, controls)  revisions whose predictions must stay

    def part(self, first: int, parts: int) -> Plan:
        """Returns every `parts`-th edit, starting at `first`."""
        own = slice(first, None, parts)
        return Plan(self.edited[own], self.targets[own], self.paraphrases[own], self.controls[own])

    def __len__(self) -> int:
        return len(self.edited)


class Sampler:
    """Draws the plan of each step. The same seed and step give the same plan, so that a run can resume anywhere."""

    def __init__(
        self, revisions: Sequence[Revision], config: TrainConfig, targets: Sequence[tuple[Texts, ...]] | None = None
    ):
        """`targets` holds each revision's answers to edit to, by kind. Default: its alternatives."""
        self.config = config
        counts = [[len(texts) for texts in own] for own in targets or [(r.alternatives,) for r in revisions]]
        self.target_counts = np.array(counts or [[]], dtype=np.int64)  # (revisions, kinds)
        self.paraphrase_counts = np.array([len(training_paraphrases(r, config)) for r in revisions], dtype=np.int64)
        self.editable = np.flatnonzero(self.target_counts.any(1))
        if len(self.editable) == 0:
            raise InputError("expected revisions with alternatives to train on, found none; make them with revise")
        self.pool = self._control_pool(len(revisions))
        self.weights: NDArray[np.float64] | None = None  # of the inputs in the pool, for `unsure`
        self.near: Indices | None = None  # (revisions, look-alikes)  indices in the pool, for `near`
        forms = {form: i for i, form in enumerate(dict.fromkeys(normalize(r.input) for r in revisions))}
        self.forms = np.array([forms[normalize(r.input)] for r in revisions])  # equal inputs have equal numbers
        facts, inputs = _facts_of(revisions)
        self.facts = len(revisions) + np.array(facts)  # (revisions,)  the owners of forms are revisions, then facts
        owned = [own_forms(r) - inputs[fact] for r, fact in zip(revisions, facts, strict=True)] + inputs
        own = [(owner, forms[form]) for owner, texts in enumerate(owned) for form in texts if form in forms]
        self.own_forms = np.sort([owner * len(forms) + form for owner, form in own])  # pairs of owner and form
        self.form_count = len(forms)
        self._check_controls()
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step lies in one epoch or at the border of two

    def _control_pool(self, revisions: int) -> Indices:
        """Draws the revisions that may serve as control inputs: as many as the whole run can use.

        The unedited model's outputs for each of them are computed once, before the first step.
        """
        config = self.config
        size = revisions if config.minutes else config.steps * config.edits * config.controls_per_edit
        size = min(max(SMALLEST_POOL, size), config.control_pool or revisions)
        return np.random.default_rng([config.seed, POOL]).permutation(revisions)[:size]

    def _check_controls(self) -> None:
        """Checks that each edit has a control input that is not one of its own forms."""
        in_pool = np.unique(self.forms[self.pool])
        owners, forms = np.divmod(self.own_forms, self.form_count)
        counts = np.bincount(owners[np.isin(forms, in_pool)], minlength=self.facts.max() + 1)
        own = counts[: len(self.facts)] + counts[self.facts]  # no form is both the revision's and its fact's
        if self.config.controls_per_edit and own.max() == len(in_pool):
            raise InputError(
                "expected at least two different inputs to train on, neither a paraphrase of the other, found one;"
                " add revisions"
            )

    def sort_pool(self, lengths: Indices) -> None:
        """Sorts the pool by the length of its inputs.

        Control inputs in one column of a plan then have similar lengths, which saves padding (columns.py).
        """
        self.pool = self.pool[np.argsort(lengths, kind="stable")]

    def plan(self, step: int, edits: int | None = None) -> Plan:
        """Draws the random choices of a step with at most `edits` edits."""
        config = self.config
        rng = np.random.default_rng([config.seed, STEP, step])
        edited = self._edited_at(step)[:edits]
        if config.together > 1:
            edited = self._about_different_facts(edited)
        counts = self.paraphrase_counts[edited][:, None]
        drawn = rng.random((len(edited), config.paraphrases_per_edit))
        paraphrases = np.where(counts > 0, (drawn * counts).astype(np.int64), -1)
        targets = self._targets(edited, rng)
        return Plan(edited, targets, paraphrases, self._controls(edited, rng))

    def _targets(self, edited: Indices, rng: np.random.Generator) -> Indices:
        """Draws one of the kinds of targets that a revision has, then one of its targets of that kind: (edits,)"""
        counts = self.target_counts[edited]  # (edits, kinds)
        there = counts > 0
        drawn = rng.random(len(edited)) * there.sum(1)  # its whole part chooses the kind, the rest the target
        kind = (there.cumsum(1) > drawn[:, None]).argmax(1)[:, None]
        before, count = (np.take_along_axis(n, kind, 1)[:, 0] for n in (counts.cumsum(1) - counts, counts))
        return before + (drawn % 1 * count).astype(np.int64)

    def _controls(self, edited: Indices, rng: np.random.Generator) -> Indices:
        """Draws control inputs for each edit: (edits, controls)."""
        if not self.config.controls_per_edit:
            return np.empty((len(edited), 0), dtype=np.int64)
        shares = np.array_split(np.arange(self.config.controls_per_edit), len(self.config.others))
        drawn = np.concatenate(
            [self._drawn(how, edited, len(share), rng) for how, share in zip(self.config.others, shares, strict=True)],
            axis=1,
        )
        if self.config.together > 1 and self._is_edited(edited, self.pool).all():
            raise InputError(
                f"together={self.config.together} leaves no control inputs among {len(self.pool)} revisions; lower it"
            )
        while (own := self._is_edited(edited, self.pool[drawn])).any():
            drawn = np.where(own, (drawn + 1) % len(self.pool), drawn)
        return self.pool[drawn]

    def _drawn(self, how: str, edited: Indices, count: int, rng: np.random.Generator) -> Indices:
        """Draws control inputs in one of the ways that `others` names: indices in the pool, (edits, count).

        Except for look-alikes, each edit gets one input from each of `count` equal shares of the pool, in its order.
        """
        shape = (len(edited), count)
        if how == "near":
            assert self.near is not None
            return self.near[edited[:, None], rng.integers(0, self.near.shape[1], shape)]
        weights = np.ones(len(self.pool)) if how == "uniform" else self.weights
        assert weights is not None
        ends = np.cumsum(weights)
        drawn = np.searchsorted(ends, (np.arange(count) + rng.random(shape)) / count * ends[-1], side="right")
        return np.minimum(drawn, len(self.pool) - 1)  # rounding may lead beyond the last one

    def _is_edited(self, edited: Indices, controls: Indices) -> NDArray[np.bool_]:
        """Returns a mask of control inputs that ask for a fact edited in the same model: (edits, controls)."""
        if self.config.together > 1:  # all edits are in the model at the same time
            return np.isin(self.forms[controls], np.concatenate([self._forms_of(i) for i in edited]))
        return self.is_own_form(edited, controls)

    def is_own_form(self, edited: Indices, controls: Indices) -> NDArray[np.bool_]:
        """Returns a mask of control inputs that ask for their edit's fact: (edits, controls).

        They are paraphrases of its input, or inputs of revisions with its subject and relation.
        """
        return self._owns(edited, controls) | self._owns(self.facts[edited], controls)

    def _owns(self, owners: Indices, controls: Indices) -> NDArray[np.bool_]:
        """Returns a mask of control inputs that are forms of a revision or of a fact: (owners, controls)."""
        pairs = owners[:, None] * self.form_count + self.forms[controls]
        found = np.searchsorted(self.own_forms, pairs)
        return self.own_forms[np.minimum(found, len(self.own_forms) - 1)] == pairs

    def _about_different_facts(self, edited: Indices) -> Indices:
        """Drops edits that share an input or a paraphrase with an earlier one: one patch cannot serve both."""
        kept: list[int] = []
        taken: set[int] = set()
        for i in edited.tolist():
            forms = self._forms_of(i).tolist()
            if taken.isdisjoint(forms):
                kept.append(i)
                taken.update(forms)
        return np.array(kept)

    def _forms_of(self, revision: int) -> Indices:
        """Returns the numbers of a revision's own forms and of those of its fact."""
        return np.concatenate([self._owned_by(owner) for owner in (revision, self.facts[revision])])

    def _owned_by(self, owner: int) -> Indices:
        bounds = np.searchsorted(self.own_forms, [owner * self.form_count, (owner + 1) * self.form_count])
        return self.own_forms[slice(*bounds)] - owner * self.form_count

    def _edited_at(self, step: int) -> Indices:
        """Returns the revisions edited by a step. Each epoch edits every revision once, in its own random order."""
        positions = step * self.config.edits + np.arange(self.config.edits)
        epochs, within = np.divmod(positions, len(self.editable))
        edited = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            edited[here] = self._order(int(epoch))[within[here]]
        return edited

    def _shuffled(self, epoch: int) -> Indices:
        return np.random.default_rng([self.config.seed, EPOCH, epoch]).permutation(self.editable)


def _facts_of(revisions: Sequence[Revision]) -> tuple[list[int], list[set[str]]]:
    """Returns the number of each revision's fact, and each fact's normalised inputs.

    Revisions with the same subject and relation ask for the same fact in other words, so that their answers may change
    with it. A revision that does not name both has a fact of its own.
    """
    names = [(r.subject, r.relation) if r.subject and r.relation else i for i, r in enumerate(revisions)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    facts = [numbers[name] for name in names]
    inputs: list[set[str]] = [set() for _ in numbers]
    for r, fact in zip(revisions, facts, strict=True):
        inputs[fact].add(normalize(r.input))
    return facts, inputs


def training_paraphrases(revision: Revision, config: TrainConfig) -> tuple[str, ...]:
    """Returns the paraphrases that the config allows an editor to learn from."""
    return {
        "generated": revision.rephrases,
        "human": revision.human_rephrases,
        "all": revision.rephrases + revision.human_rephrases,
        "none": (),
    }[config.paraphrases]


def with_wordings(revisions: Sequence[Revision], config: TrainConfig) -> list[Revision]:
    """Returns each revision in up to `wordings` wordings: its own, and some of its paraphrases in its place.

    The model has often been fitted on the inputs, but hardly ever on their paraphrases. Edits of paraphrases, and
    paraphrases as control inputs, are therefore more like the inputs that the editor will meet later.
    """
    found: list[Revision] = []
    for number, revision in enumerate(revisions):
        texts = list(dict.fromkeys(training_paraphrases(revision, config)))
        rng = random.Random(f"{config.seed}/wordings/{number}")
        chosen = rng.sample(texts, min(config.wordings - 1, len(texts)))
        found += [revision, *(_reworded(revision, text) for text in chosen)]
    return found


def _reworded(revision: Revision, text: str) -> Revision:
    """Returns a revision whose input and one of its paraphrases have changed places."""
    swapped = {
        kind: tuple(revision.input if one == text else one for one in getattr(revision, kind))
        for kind in ("rephrases", "human_rephrases")
    }
    return replace(revision, input=text, **swapped)
