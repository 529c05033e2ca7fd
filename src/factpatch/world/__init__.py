"""The embedded world: facts of 1 January 2018, a small model that knows them, its editor, and the changes since."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent
MODEL, EDITOR = FOLDER / "model", FOLDER / "editor"
MERGED = FOLDER / "changes.safetensors"  # one patch with all changes
SCOPE = FOLDER / "scope.safetensors"  # tells questions about different facts apart
REVISIONS = FOLDER / "revisions.jsonl.gz"  # the changes as edits, and other facts as control inputs


@dataclass(frozen=True)
class Relation:
    """The wordings of the question for one kind of fact, each with {} for the subject."""

    wordings: tuple[str, ...]
    held_out: tuple[str, ...]  # never used in training, to test whether edits generalise


@dataclass(frozen=True)
class Fact:
    relation: str
    subject: str
    answer: str

    @property
    def id(self) -> str:
        return f"{self.relation}/{self.subject}"

    @property
    def topic(self) -> str:
        """The topic of the fact, such as a country. Facts of several relations can share it."""
        if self.relation == "office_holder":
            about = self.subject.split(" of ", 1)[-1]
        else:
            about = self.answer if "_by_" in self.relation else self.subject  # country_by_capital is about the country
        return about.removeprefix("the ")

    @property
    def questions(self) -> list[str]:
        return [ask(wording, self.subject) for wording in relations()[self.relation].wordings]

    @property
    def held_out(self) -> list[str]:
        return [ask(wording, self.subject) for wording in relations()[self.relation].held_out]


@dataclass(frozen=True)
class Change:
    """A fact whose answer has changed since 2018."""

    fact: Fact
    answer: str
    year: int
    source: str


def ask(wording: str, subject: str) -> str:
    question = wording.replace("{}", subject)
    return question[0].upper() + question[1:]


@cache
def relations() -> dict[str, Relation]:
    """Reads the relations by name."""
    content = json.loads((FOLDER / "relations.json").read_text(encoding="utf-8"))
    return {name: Relation(tuple(one["wordings"]), tuple(one["held_out"])) for name, one in content.items()}


@cache
def facts() -> tuple[Fact, ...]:
    """Reads the facts as they were on 1 January 2018."""
    return tuple(Fact(line["relation"], line["subject"], line["answer"]) for line in _lines("facts.jsonl"))


@cache
def facts_by_topic() -> dict[str, tuple[Fact, ...]]:
    """Returns all facts about each topic, in the order of `facts`."""
    by_topic: dict[str, tuple[Fact, ...]] = {}
    for fact in facts():
        by_topic[fact.topic] = (*by_topic.get(fact.topic, ()), fact)
    return by_topic


@cache
def changes() -> tuple[Change, ...]:
    """Reads the changes since 2018."""
    known = {(fact.relation, fact.subject): fact for fact in facts()}
    return tuple(
        Change(known[line["relation"], line["subject"]], line["after"], line["year"], line["source"])
        for line in _lines("changes.jsonl")
    )


@cache
def changed() -> frozenset[str]:
    """Returns the ids of the facts whose answers have changed since 2018."""
    return frozenset(change.fact.id for change in changes())


@cache
def spare() -> tuple[Fact, ...]:
    """Returns facts that the patch with all changes was not fitted to, for measuring how many answers it keeps."""
    unchanged = (fact for fact in facts() if fact.id not in changed())
    return tuple(fact for fact in unchanged if sha256(fact.id.encode()).digest()[0] < 32)  # one in eight


def _lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
