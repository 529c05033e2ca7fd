"""What is measured, as pure functions of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from factpatch.facts import Revision, normalize, same


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
    """Other inputs, and what is known of each before any edit. Edits are many, so this is worked out once."""

    def __init__(self, revisions: Sequence[Revision]):
        self.inputs = np.array([normalize(r.input) for r in revisions], dtype=object)
        self.predictions = [normalize(r.prediction) for r in revisions]
        self.answers = [frozenset(map(normalize, r.answers)) for r in revisions]
        self.has_answers = np.array([bool(answers) for answers in self.answers], dtype=bool)
        self.right = self.matches(self.predictions)

    def matches(self, said: Sequence[str]) -> NDArray[np.bool_]:
        """Which of the normalised outputs are a gold answer of their input."""
        return np.array([text in answers for text, answers in zip(said, self.answers, strict=True)], dtype=bool)


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
    x = normalize(revision.input)
    kept = others.inputs != x
    now = [normalize(text) for text in says_others]
    stays = np.array([a == b for a, b in zip(now, others.predictions, strict=True)], dtype=bool)
    known = kept & others.has_answers
    moved = kl_others[kept & stays].tolist() if kl_others is not None else []

    def gives_target(texts: Sequence[str]) -> float | None:
        return share(same(says[text], target) for text in texts if normalize(text) != x)

    return Outcome(
        success=same(says[revision.input], target),
        retain=share(stays[kept]),
        equivalence=gives_target(revision.rephrases),
        equivalence_human=gives_target(revision.human_rephrases),
        accuracy_before=share(others.right[known]),
        accuracy_after=share(others.matches(now)[known]),
        kl_mean=mean(moved),
        kl_worst=max(moved, default=None),
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


def share(truths: Iterable[bool]) -> float | None:
    return mean(map(float, truths))


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
