"""What is measured, as pure functions of predictions."""

from __future__ import annotations

from collections.abc import Sequence

from factpatch.facts import same


def is_correct(prediction: str, answers: Sequence[str]) -> bool:
    """Exact match after normalising, with any gold answer."""
    return any(same(prediction, answer) for answer in answers)


def accuracy(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Share of predictions that match a gold answer: accuracy of labels, exact match of answers."""
    return sum(map(is_correct, predictions, answers)) / len(predictions)
