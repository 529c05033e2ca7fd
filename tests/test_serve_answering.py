"""Remembered answers: the model runs once per question, and changes of the facts are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_ledger import OTHERS, Guess

from factpatch.data.revisions import Revision
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.models import TaskModel
from factpatch.scope import Scope
from factpatch.serve import answering
from factpatch.serve.answering import Answering, Ask, Recent

X, Y = OTHERS[:2]


def test_only_recent_entries_are_kept() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.add({"a": 1, "b": 2})
    assert recent.find(["a", "x"]) == {"a": 1}
    recent.add({"c": 3})
    assert list(recent) == ["a", "c"], "b was used the longest ago"


def test_the_model_runs_once_per_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("bert")
    asked: list[str] = []

    def counted(name: str) -> None:
        own = getattr(answering, name)

        def run(model: TaskModel, *given: Any) -> Any:
            texts: Sequence[str] = given[-1]
            asked.extend(texts)
            return own(model, *given)

        monkeypatch.setattr(answering, name, run)

    counted("best_answers")
    counted("best_answers_patched")
    with Ledger(tmp_path / "facts.db", model, OTHERS) as ledger, Ledger(tmp_path / "facts.db", model) as elsewhere:
        scope = Scope.plain(model, [Revision(x, x, "", (), (), (), ()) for x in OTHERS], false_matches=0.0)
        ledger.scope = scope
        service = Answering(model, ledger)

        def said(*texts: str, with_facts: bool = True) -> list[str]:
            return [found.answers[0].text for found in service.answer([Ask(text, with_facts) for text in texts])]

        before = said(X, Y, X)
        assert asked == [X, Y], "a question that is asked twice runs once"
        assert said(Y, X) == [before[1], before[0]]
        assert asked == [X, Y]

        target = tiny.other_answer(model, X)
        (fact,) = elsewhere.add(Guess(), [FactEdit(X, target)])
        assert said(X, Y) == [target, before[1]], "another process has added a fact"
        assert said(X, with_facts=False) == [before[0]]
        assert asked == [X, Y, X]

        elsewhere.remove(fact.id)
        assert said(X, Y) == before[:2]
        assert asked == [X, Y, X]
