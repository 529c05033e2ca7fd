"""The best answers have the probabilities that the model gives them, also under patches of their own."""

from __future__ import annotations

import pytest
import tiny
from conftest import QUESTIONS, assert_untouched, weights_of

from factpatch.editors import HyperNetwork
from factpatch.facts import FactEdit
from factpatch.models import Classifier, TaskModel
from factpatch.models.answers import Answer, best_answers, best_answers_patched
from factpatch.models.rows import NO_TARGET


def probability(model: TaskModel, x: str, answer: str) -> float:
    """Computed from the mean loss of one row."""
    rows = model.rows([x], [answer])
    assert rows.labels is not None
    return float((-model.losses(rows) * (rows.labels != NO_TARGET).sum()).exp())


def close(found: list[Answer], expected: list[Answer]) -> None:
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.probability for one in found] == pytest.approx([one.probability for one in expected], rel=1e-3)


def test_answers_are_the_candidates_with_their_probabilities(model: TaskModel) -> None:
    before = weights_of(model)
    for x, found, candidates in zip(
        QUESTIONS, best_answers(model, QUESTIONS), model.candidates(QUESTIONS), strict=True
    ):
        assert [one.text for one in found] == list(dict.fromkeys(candidates))
        assert len(found) > 1
        expected = [Answer(one.text, probability(model, x, one.text)) for one in found]
        close(found, expected)
        if isinstance(model, Classifier):
            assert sum(one.probability for one in found) == pytest.approx(1)
    assert best_answers(model, []) == []
    assert_untouched(model, before)


def test_each_input_is_answered_under_its_own_patch(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]
) -> None:
    patches = editor.propose(model, edits)
    found = best_answers_patched(model, patches, QUESTIONS)
    for x, patch, answers in zip(QUESTIONS, patches, found, strict=True):
        with patch.applied(model):
            close(answers[:1], best_answers(model, [x])[0][:1])
    assert best_answers_patched(model, [], []) == []


def test_answers_of_unequal_number_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("bart")
    monkeypatch.setattr(model, "decide", lambda rows, count, edits: [["paris"], ["gitega", "france", "euro"]])
    first, second = best_answers(model, QUESTIONS[:2])
    close(first, [Answer("paris", probability(model, QUESTIONS[0], "paris"))])
    close(second, [Answer(text, probability(model, QUESTIONS[1], text)) for text in ("gitega", "france", "euro")])
