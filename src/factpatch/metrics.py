"""What is measured, as pure functions of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from factpatch.data.revisions import Revision
from factpatch.facts import normalize, same


def is_correct(prediction: str, answers: Sequence[str]) -> bool:
    """Exact match after normalising, with any gold answer."""
    return any(same(prediction, answer) for answer in answers)


def accuracy(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Share of predictions that match a gold answer: accuracy of labels, exact match of answers."""
    return sum(map(is_correct, predictions, answers)) / len(predictions)


@dataclass(frozen=True)
class Outcome:
    """What one edit did. Shares are None where there was nothing to look at."""

    success: bool  # x now gives a
    retain: float | None  # share of other inputs whose prediction is unchanged
    equivalence: float | None  # share of generated paraphrases that now give a
    equivalence_human: float | None  # the same of paraphrases that people wrote
    accuracy_before: float | None  # of the other inputs, against gold answers
    accuracy_after: float | None
    kl_mean: float | None = None  # how far the scores of unchanged predictions have moved
    kl_worst: float | None = None


class Others:
    """Other inputs, and what is known of each before any edit. Edits are many, so this is worked out once.

    Texts are numbered, and those that are the same after normalising share a number.
    """

    def __init__(self, revisions: Sequence[Revision]):
        self._by_form: dict[str, int] = {}
        self._by_text: dict[str, int] = {}
        self.inputs = self.numbers([r.input for r in revisions])  # (inputs,)
        self.predictions = self.numbers([r.prediction for r in revisions])  # (inputs,)
        self.answers = np.full((len(revisions), max((len(r.answers) for r in revisions), default=0)), -1)
        for row, revision in zip(self.answers, revisions, strict=True):
            row[: len(revision.answers)] = self.numbers(revision.answers)
        self.has_answers = (self.answers >= 0).any(1)
        self.right = self.matches(self.predictions)

    def numbers(self, texts: Sequence[str]) -> NDArray[np.int64]:
        for text in set(texts) - self._by_text.keys():
            self._by_text[text] = self._by_form.setdefault(normalize(text), len(self._by_form))
        return np.fromiter(map(self._by_text.__getitem__, texts), np.int64, len(texts))

    def matches(self, said: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which outputs are a gold answer of their input."""
        return (self.answers == said[:, None]).any(1)


def outcome(
    revision: Revision,
    target: str,
    says: dict[str, str],
    others: Others,
    says_others: Sequence[str],
    kl_others: NDArray[np.float32] | None = None,
) -> Outcome:
    """From what the edited model says to x and its paraphrases, by text, and to other inputs, in their order.

    Inputs equal to x after normalising are no other inputs, and never count as paraphrases.
    """
    kept = others.inputs != others.numbers([revision.input])
    now = others.numbers(says_others)
    stays = now == others.predictions
    known = kept & others.has_answers
    moved = kl_others[kept & stays].astype(np.float64) if kl_others is not None else np.empty(0)

    def gives_target(texts: Sequence[str]) -> float | None:
        return mean(float(same(says[text], target)) for text in texts if not same(text, revision.input))

    return Outcome(
        success=same(says[revision.input], target),
        retain=_mean_of(stays[kept]),
        equivalence=gives_target(revision.rephrases),
        equivalence_human=gives_target(revision.human_rephrases),
        accuracy_before=_mean_of(others.right[known]),
        accuracy_after=_mean_of(others.matches(now)[known]),
        kl_mean=_mean_of(moved),
        kl_worst=float(moved.max()) if len(moved) else None,
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Means over edits; deterioration is 1 − accuracy after / accuracy before."""
    before = mean(o.accuracy_before for o in outcomes)
    after = mean(o.accuracy_after for o in outcomes)
    return {
        "success": mean(float(o.success) for o in outcomes),
        "retain": mean(o.retain for o in outcomes),
        "equivalence": mean(o.equivalence for o in outcomes),
        "equivalence_human": mean(o.equivalence_human for o in outcomes),
        "deterioration": 1 - after / before if before and after is not None else None,
        "kl_mean": mean(o.kl_mean for o in outcomes),
        "kl_worst": max((o.kl_worst for o in outcomes if o.kl_worst is not None), default=None),
    }


def intervals(outcomes: Sequence[Outcome], samples: int = 1000, seed: int = 0) -> dict[str, list[float]]:
    """95 % bootstrap intervals of the summary's means, edits drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(0, len(outcomes), (samples, len(outcomes)))

    def means(key: str) -> NDArray[np.float64]:
        """Of each sample, over the edits that have a value."""
        values = np.array([np.nan if (value := getattr(o, key)) is None else float(value) for o in outcomes])
        there = ~np.isnan(values)
        counts = there[drawn].sum(1)
        return np.where(there, values, 0)[drawn].sum(1)[counts > 0] / counts[counts > 0]

    sampled = {key: means(key) for key in ("success", "retain", "equivalence", "equivalence_human")}
    before, after = means("accuracy_before"), means("accuracy_after")
    sampled["deterioration"] = (1 - after / before) if len(before) == len(after) and (before > 0).all() else before[:0]
    return {key: np.quantile(found, [0.025, 0.975]).tolist() for key, found in sampled.items() if len(found)}


def _mean_of(values: NDArray[np.bool_] | NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
