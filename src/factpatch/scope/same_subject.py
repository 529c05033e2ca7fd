"""Makes up questions that ask something else about the subject of a fact.

In data that rarely has two facts about one subject, such as zsRE, a text can be matched to its fact by the subject
alone. A scope trained on such data would also match "What does X do?" to the fact "Where was X born?". Made-up
questions show it the difference: the wordings of a fact of another relation, with this subject in the place of their
own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

from factpatch.facts import normalize


class HasSubject(Protocol):
    @property
    def subject(self) -> str | None: ...
    @property
    def relation(self) -> str | None: ...


def made_up_questions(
    facts: Sequence[HasSubject], texts: Sequence[Sequence[str]], count: int, seed: int
) -> list[list[str]]:
    """Invents at most `count` questions, each about another subject, and returns two or more wordings of each.

    `texts` holds the wordings of each fact. No question asks what a fact about the same subject asks. Facts without a
    subject or relation are skipped; if none are left, the result is empty.
    """
    templates: list[tuple[str, str, list[str]]] = []  # subject, relation, and the wordings that contain the subject
    for fact, wordings in zip(facts, texts, strict=True):
        if fact.subject and fact.relation:
            own = [text for text in wordings if _as_words(fact.subject).search(text)]
            templates.append((fact.subject, fact.relation, own))
    subjects = list(dict.fromkeys(subject for subject, _, own in templates if own))
    asked = {(subject, relation) for subject, relation, _ in templates}
    templates = [template for template in templates if len(template[2]) > 1]
    rng = random.Random(seed)
    made_up: list[list[str]] = []
    for subject in rng.sample(subjects, min(count, len(subjects))) if templates else []:
        replaced, relation, wordings = rng.choice(templates)
        if (subject, relation) not in asked:
            questions = [_as_words(replaced).sub(lambda _, new=subject: new, text) for text in wordings]
            different = list({normalize(question): question for question in questions}.values())
            made_up += [different] if len(different) > 1 else []
    return made_up


def _as_words(subject: str) -> re.Pattern[str]:
    """Finds a subject, but not as a part of a longer word."""
    return re.compile(rf"(?<!\w){re.escape(subject)}(?!\w)")
