"""The best answers have the probabilities that the model gives them, also under patches of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
from conftest import QUESTIONS, assert_untouched, weights_of

from factpatch.editors import HyperNetwork
from factpatch.facts import FactEdit
from factpatch.models import Classifier, Seq2Seq, TaskModel
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
    found = [[("paris", None)], [("gitega", None), ("france", None), ("euro", None)]]
    monkeypatch.setattr(model, "decide_scored", lambda rows, count, edits: found)
    first, second = best_answers(model, QUESTIONS[:2])
    close(first, [Answer("paris", probability(model, QUESTIONS[0], "paris"))])
    close(second, [Answer(text, probability(model, QUESTIONS[1], text)) for text in ("gitega", "france", "euro")])


@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_the_search_itself_finds_probabilities(name: str, penalty: float) -> None:
    """Scores of the beam search give the probabilities that a pass over the answers gives."""
    model = tiny.build(name)
    assert isinstance(model, Seq2Seq)
    model.generation.length_penalty = penalty
    tiny.end_early(model)
    compared = 0
    for x, found in zip(QUESTIONS, model.decide_scored(model.rows(QUESTIONS), 5), strict=True):
        for text, log_p in found:
            if log_p is not None:
                assert math.exp(log_p) == pytest.approx(probability(model, x, text), rel=1e-4)
                compared += 1
    assert compared


@pytest.mark.parametrize("changes", [{"forced_bos_token_id": 5}, {"renormalize_logits": True}, {"max_new_tokens": 1}])
def test_scores_that_are_no_probabilities_are_not_used(changes: dict[str, Any]) -> None:
    model = tiny.build("bart")
    assert isinstance(model, Seq2Seq)
    model.limit_answers(changes.pop("max_new_tokens", model.max_answer_tokens))
    model.generation.update(**changes)
    for found in model.decide_scored(model.rows(QUESTIONS), 5):
        assert [log_p for _, log_p in found] == [None] * len(found)


def test_known_and_computed_probabilities_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("bart")
    found = [[("paris", -1.0), ("euro", None)], [("gitega", -2.0), ("gitega", None), ("france", -3.0)]]
    monkeypatch.setattr(model, "decide_scored", lambda rows, count, edits: found)
    first, second = best_answers(model, QUESTIONS[:2])
    close(first, [Answer("paris", math.exp(-1)), Answer("euro", probability(model, QUESTIONS[0], "euro"))])
    close(second, [Answer("gitega", probability(model, QUESTIONS[1], "gitega")), Answer("france", math.exp(-3))])
