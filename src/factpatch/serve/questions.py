"""The ordinary questions of a model: the sample that proposals are tried on, and how known questions are spelled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from factpatch import demo, world
from factpatch.data.revisions import read_revisions
from factpatch.errors import InputError
from factpatch.facts import normalize

CONTROLS = 100  # questions that each proposal is tried on
EXAMPLES = ("capital/Burundi", "office_holder/Pope", "currency/Croatia")  # of the embedded world


@dataclass(frozen=True)
class Example:
    """A correction to try on the page."""

    question: str
    target: str


@dataclass(frozen=True)
class Questions:
    """Groups of wordings of the same question, the usual wording first."""

    groups: Sequence[Sequence[str]]
    controls: Sequence[str]
    examples: Sequence[Example] = ()
    about: str = ""  # what the model knows, for people who see it for the first time

    @cached_property
    def _known(self) -> dict[str, tuple[str, int]]:
        """The spelling and the group's number of each question, by its normalised form."""
        return {normalize(text): (text, n) for n, texts in enumerate(self.groups) for text in texts}

    def spell(self, question: str) -> str:
        """Returns a known question in its recorded spelling, any other as typed, without spaces around it."""
        return self._known.get(normalize(question), (question.strip(), 0))[0]

    def other_wordings(self, question: str) -> list[str]:
        """Returns known wordings of the same question, those least like the usual one first."""
        if (found := self._known.get(normalize(question))) is None:
            return []
        return [text for text in reversed(self.groups[found[1]]) if normalize(text) != normalize(question)]

    def controls_besides(self, wordings: Sequence[str]) -> list[str]:
        """Returns the control questions that are not wordings of these questions."""
        forms = {normalize(text) for text in wordings}
        own = {self._known[form][1] for form in forms if form in self._known}
        return [x for x in self.controls if normalize(x) not in forms and self._known[normalize(x)][1] not in own]


def world_questions(seed: int = 0) -> Questions:
    """Returns the questions of the embedded world."""
    facts = world.facts()
    groups = [[*fact.questions, *fact.held_out] for fact in facts]
    controls = [demo.question_of(fact) for fact in random.Random(seed).sample(facts, CONTROLS)]
    changes = {change.fact.id: change for change in world.changes()}
    examples = [Example(changes[name].fact.questions[0], changes[name].answer) for name in EXAMPLES]
    about = f"This small model knows {len(facts):,} facts about the world of 2018."
    return Questions(groups, controls, examples, about)


def read_questions(path: str | Path, seed: int = 0) -> Questions:
    """Reads the questions of a revision file."""
    revisions = list(read_revisions(path))
    if not revisions:
        raise InputError(f"{path} has no inputs; give a file of questions that users ask, such as a revision file")
    groups = [[r.input, *r.rephrases, *r.human_rephrases] for r in revisions]
    sample = random.Random(seed).sample(revisions, min(CONTROLS, len(revisions)))
    examples = [Example(r.input, r.alternatives[0]) for r in revisions if r.alternatives][:3]
    return Questions(groups, [r.input for r in sample], examples)
