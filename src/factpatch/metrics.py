"""What is measured, as pure functions of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def outcome(
    revision: Revision, target: str, says: dict[str, str], others: Sequence[Revision], says_others: Sequence[str]
) -> Outcome:
    """From what the edited model says to x and its paraphrases, by text, and to other inputs, in their order.

    Inputs equal to x after normalising are no other inputs, and never count as paraphrases.
    """
    x = normalize(revision.input)
    kept = [(other, said) for other, said in zip(others, says_others, strict=True) if normalize(other.input) != x]
    known = [(other, said) for other, said in kept if other.answers]

    def gives_target(texts: Sequence[str]) -> float | None:
        return share(same(says[text], target) for text in texts if normalize(text) != x)

    return Outcome(
        success=same(says[revision.input], target),
        retain=share(same(said, other.prediction) for other, said in kept),
        equivalence=gives_target(revision.rephrases),
        equivalence_human=gives_target(revision.human_rephrases),
        accuracy_before=share(is_correct(other.prediction, other.answers) for other, _ in known),
        accuracy_after=share(is_correct(said, other.answers) for other, said in known),
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
    }


def share(truths: Iterable[bool]) -> float | None:
    return mean(map(float, truths))


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
