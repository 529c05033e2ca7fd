"""Questions about the embedded world's facts as people type them: short forms, any case, typing errors.

`Typist.questions` draws wordings of a fact's question from tools/world-wordings.json and types each of them the way
people do. The wordings of tools/world-questions.jsonl and the held-out ones of relations.json are not used.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import defaultdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from factpatch.facts import normalize
from factpatch.world import Fact, facts, relations

WORDINGS = json.loads((Path(__file__).parent / "world-wordings.json").read_text(encoding="utf-8"))
HELD_OUT = 20  # one wording in this many is never trained on, to choose settings with
FORMAL = 0.3  # share of questions in the wordings of relations.json
STYLES = {"lower": 45, "as it is": 25, "lower first": 15, "upper": 6, "title": 9}  # capitalisation, with weights
ENDINGS = {"": 55, "?": 35, " ?": 3, "??": 2, ".": 3, "!": 2}
FILLERS = "please exactly actually again now today currently really just then ok hey hi so well um quickly".split()
SMALL_WORDS = "the of is in does a do for to are an".split()
CONTRACTIONS = {
    "what is": ("what's", "whats", "what s"),
    "who is": ("who's", "whos", "who s"),
    "where is": ("where's", "wheres"),
    "which is": ("which's",),
    "what are": ("whatre",),
}
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
SUBJECT = "subject"  # stands for the subject where wordings are compared
Choice = TypeVar("Choice")
SHORTEST_MISTYPED = 4  # letters; shorter words are often codes, which a wrong letter makes another code


@cache
def wordings(relation: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the informal wordings of a relation's question, with {} for the subject: from phrases, and others."""
    own = WORDINGS["relations"][relation]
    phrases = list(own.get("phrases", []))
    for noun in own.get("nouns", []):
        phrases += [f"{noun} {preposition} {{}}" for preposition in own["prepositions"]]
        phrases += [f"{{}}'s {noun}", f"{{}} {noun}", f"{noun} {{}}"]
    framed = [frame.replace("[]", phrase) for phrase in phrases for frame in own.get("frames", WORDINGS["frames"])]
    framed = [re.sub(r"\bthe \{\}'s", "{}'s", text) for text in framed]  # "the Chad's capital"
    return tuple(dict.fromkeys(framed)), tuple(own["questions"])


@cache
def split_wordings(relation: str) -> tuple[list[list[str]], list[str]]:
    """Returns the informal wordings to train on, in two groups that are drawn equally often, and the held-out ones."""
    groups = [[text for text in group if not _is_held_out(relation, text)] for group in wordings(relation)]
    held_out = [text for group in wordings(relation) for text in group if _is_held_out(relation, text)]
    return [group for group in groups if group], held_out


def _is_held_out(relation: str, wording: str) -> bool:
    return int(sha256(f"{relation} {wording}".encode()).hexdigest(), 16) % HELD_OUT == 0


class Typist:
    """Types questions about facts. No question that two facts answer differently is ever typed."""

    def __init__(self) -> None:
        self.words = {word for fact in facts() for word in re.findall(r"\w+", fact.subject.lower())}
        self.answers: dict[tuple[str, str], set[str]] = defaultdict(set)  # to a subject under the same wordings
        for fact in facts():
            self.answers[fact.relation.removeprefix("us_state_"), fact.subject].add(fact.answer)

    def questions(self, fact: Fact, count: int, rng: random.Random, held_out: bool = False) -> list[str]:
        """Types a fact's question in `count` wordings drawn at random, which may repeat."""
        return [self._question(fact, rng, held_out) for _ in range(count)]

    def _question(self, fact: Fact, rng: random.Random, held_out: bool) -> str:
        groups, unseen = split_wordings(fact.relation)
        ambiguous = len(self.answers[fact.relation.removeprefix("us_state_"), fact.subject]) > 1
        if not held_out and (rng.random() < FORMAL or (ambiguous and fact.relation.startswith("us_state_"))):
            return self.typed(rng.choice(relations()[fact.relation].wordings), fact, rng)
        return self.typed(rng.choice(unseen if held_out else rng.choice(groups)), fact, rng)

    def typed(self, wording: str, fact: Fact, rng: random.Random) -> str:
        """Puts a form of the fact's subject into a wording, and types the question with one person's habits."""
        text = wording.rstrip("?").replace("{}", subject_form(fact, rng))
        text = re.sub(r"\bthe the\b", "the", text)
        if rng.random() < 0.12:
            text = _without_small_word(text, rng)
        if rng.random() < 0.06:
            text = f"{rng.choice(FILLERS)} {text}" if rng.random() < 0.5 else f"{text} {rng.choice(FILLERS)}"
        if rng.random() < 0.4:
            text = _contracted(text, rng)
        if rng.random() < 0.25:
            text = _without_accents(text)
        if rng.random() < 0.3:
            text = self.mistyped(text, rng)
        text = _capitalised(text, weighted(STYLES, rng))
        return text + weighted(ENDINGS, rng)

    def mistyped(self, text: str, rng: random.Random) -> str:
        """Types one letter wrong, unless the result is another word that subjects contain, such as Iran for Iraq."""
        words = [found for found in re.finditer(r"[^\W\d_]+", text) if len(found[0]) >= SHORTEST_MISTYPED]
        if not words:
            return text
        word = rng.choice(words)
        wrong = _one_letter_wrong(word[0], rng)
        if wrong.lower() in self.words:
            return text
        return text[: word.start()] + wrong + text[word.end() :]


def subject_form(fact: Fact, rng: random.Random) -> str:
    """Returns the subject by its own name or by another that people use."""
    subject = fact.subject
    if (aliases := WORDINGS["aliases"].get(subject)) and rng.random() < 0.3:
        return rng.choice(aliases)
    if fact.relation == "office_holder":
        office, _, place = subject.partition(" of ")
        if place and rng.random() < 0.4:
            place = rng.choice(WORDINGS["aliases"].get(place, [place.removeprefix("the "), place]))
            return rng.choice([f"{place}'s {office}", f"{place} {office}", f"{office} {place}", f"{office} of {place}"])
    if fact.relation == "world_record":
        words = [rng.choice([word, *WORDINGS["synonyms"].get(word, ())]) for word in subject.split()]
        return re.sub(r" by (area|capacity)$", "", " ".join(words)) if rng.random() < 0.5 else " ".join(words)
    return subject.removeprefix("the ") if rng.random() < 0.5 else subject


def _one_letter_wrong(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word))
    kind = rng.choice(("missing", "double", "swapped", "neighbour", "neighbour", "any"))
    if kind == "missing":
        return word[:i] + word[i + 1 :]
    if kind == "double":
        return word[: i + 1] + word[i:]
    if kind == "swapped":
        i = min(i, len(word) - 2)
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    letter = rng.choice(_neighbours(word[i].lower())) if kind == "neighbour" else rng.choice("".join(KEYBOARD))
    return word[:i] + (letter.upper() if word[i].isupper() else letter) + word[i + 1 :]


@cache
def _neighbours(letter: str) -> str:
    """Returns the letters beside a letter on the keyboard, or all of them if it has no key there."""
    for row in KEYBOARD:
        if letter in row:
            i = row.index(letter)
            return row[max(0, i - 1) : i] + row[i + 1 : i + 2]
    return "".join(KEYBOARD)


def _without_small_word(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    small = [i for i, word in enumerate(words) if word.lower() in SMALL_WORDS]
    if small:
        del words[rng.choice(small)]
    return " ".join(words)


def _contracted(text: str, rng: random.Random) -> str:
    for full, short in CONTRACTIONS.items():
        text = re.sub(rf"^{full}\b", rng.choice(short), text, flags=re.IGNORECASE)
    return text.replace("'s ", "s ") if rng.random() < 0.3 else text


def _without_accents(text: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFD", text) if not unicodedata.combining(letter))


def _capitalised(text: str, style: str) -> str:
    if style in ("lower", "upper"):
        return text.lower() if style == "lower" else text.upper()
    if style == "title":
        return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))
    return (text[:1].lower() if style == "lower first" else text[:1].upper()) + text[1:]


def weighted(weights: dict[Choice, int], rng: random.Random) -> Choice:
    """Draws one of the keys, each with the probability that its weight stands for."""
    return rng.choices(list(weights), list(weights.values()))[0]


def questions_to_check() -> list[dict[str, str]]:
    """Reads the questions that someone wrote who had not seen the training wordings. Never trained on."""
    lines = (Path(__file__).parent / "world-questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def trained_wording(question: str, subject: str, relation: str) -> bool:
    """Whether a question has one of the wordings that are trained on, in any case and punctuation."""
    bare = re.escape(subject.removeprefix("the "))
    wording = normalize(re.sub(rf"\b(the )?{bare}\b", SUBJECT, question, flags=re.IGNORECASE))
    known = [*relations()[relation].wordings, *(text for group in split_wordings(relation)[0] for text in group)]
    return wording in {normalize(text.replace("{}", SUBJECT)) for text in known}
