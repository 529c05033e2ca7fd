"""Answers questions under the patches of the accepted facts, and caches recent answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from factpatch.ledger import Ledger
from factpatch.ledger_store import Fact
from factpatch.models import TaskModel
from factpatch.models.answers import Answer, best_answers, best_answers_patched

CACHED = 4096  # entries of each cache

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ask:
    question: str
    with_facts: bool


@dataclass(frozen=True)
class Answered:
    """The best answers to a question, and the accepted fact that they come from, if any."""

    question: str  # as the model read it
    answers: list[Answer]
    fact: Fact | None


class Recent(OrderedDict[Key, Value]):
    """A cache of the most recently used entries."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def find(self, keys: Iterable[Key]) -> dict[Key, Value]:
        found = {key: self[key] for key in keys if key in self}
        for key in found:
            self.move_to_end(key)
        return found

    def add(self, entries: dict[Key, Value]) -> None:
        self.update(entries)
        while len(self) > self.limit:
            self.popitem(last=False)


class Answering:
    """Answers questions with one model and one ledger.

    Cached answers never become stale, because neither the model nor a recorded patch ever changes.
    """

    def __init__(self, model: TaskModel, ledger: Ledger):
        self.model, self.ledger = model, ledger
        self._facts_of: Recent[str, Fact | None] = Recent(CACHED)  # by question, for the active facts below
        self._active: list[int] = []
        self._answers: Recent[tuple[str, int | None], list[Answer]] = Recent(CACHED)  # by question and fact

    def answer(self, asks: Sequence[Ask]) -> list[Answered]:
        """Answers each question under the patch of the accepted fact that it is about, or with the unedited model."""
        matched = self._match([ask.question for ask in asks if ask.with_facts])
        facts = [matched[ask.question] if ask.with_facts else None for ask in asks]
        wanted = {(ask.question, fact and fact.id): fact for ask, fact in zip(asks, facts, strict=True)}
        known = self._answers.find(wanted)
        new = self._compute({key: fact for key, fact in wanted.items() if key not in known})
        self._answers.add(new)
        known |= new
        return [
            Answered(ask.question, known[ask.question, fact and fact.id], fact)
            for ask, fact in zip(asks, facts, strict=True)
        ]

    def _match(self, questions: Sequence[str]) -> dict[str, Fact | None]:
        """Finds the active fact that each question is about. Other processes may change the ledger at any time."""
        active = self.ledger.store.active_ids()
        if active != self._active:
            self._facts_of.clear()
        known = self._facts_of.find(questions)
        new = [text for text in dict.fromkeys(questions) if text not in known]
        found = dict(zip(new, self.ledger.match(new), strict=True)) if new else {}
        self._facts_of.add(found)
        self._active = active
        return known | found

    def _compute(self, wanted: dict[tuple[str, int | None], Fact | None]) -> dict[tuple[str, int | None], list[Answer]]:
        plain = [key for key, fact in wanted.items() if fact is None]
        edited = {key: self.ledger.patch_of(fact) for key, fact in wanted.items() if fact is not None}
        unpatched = best_answers(self.model, [text for text, _ in plain])
        patched = best_answers_patched(self.model, list(edited.values()), [text for text, _ in edited])
        return {**dict(zip(plain, unpatched, strict=True)), **dict(zip(edited, patched, strict=True))}
