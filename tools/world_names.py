"""Names for the embedded world to learn: those of its facts, and made-up ones that nobody has read before."""

from __future__ import annotations

import random
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from world_typing import weighted

from factpatch.world import Fact, changes, facts

LENGTHS = {1: 32, 2: 44, 3: 12, 4: 6, 5: 4, 6: 2}  # number of words in made-up names, with weights
SOURCES = {"world": 18, "list": 27, "joined": 10, "letters": 45}  # of the words of made-up names, with weights
LINKS = "of the de la van der von al el and in du da".split()
ACCENTS = dict(zip("aeiouncsgAEO", "áéíóúñçšğÁÉÖ", strict=True))
NEW_ANSWERS = {"alike": 3, "known": 2, "made up": 5}  # kinds of target answers in the editor's training, with weights
LONGEST_WORD = 12  # letters of an invented word


class Names:
    """All names that may be an answer: those of 2018, those of today, and made-up ones.

    The model learns to spell today's names, as a larger model has read people's names before they take office.
    Neither the model nor the editor learns which questions these names answer.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = defaultdict(list)
        for fact in facts():
            self.of[fact.relation].append(fact.answer)
        self.now = {change.fact.id: change.answer for change in changes()}
        self.known = list(dict.fromkeys([*(fact.answer for fact in facts()), *self.now.values()]))
        subjects = [fact.subject for fact in facts() if fact.relation != "world_record"]
        self.words = list(dict.fromkeys(word for name in (*self.known, *subjects) for word in name.split()))
        self.common = (Path(__file__).parent / "world-words.txt").read_text(encoding="utf-8").split()
        self.letters = Letters([word for word in (*self.words, *self.common) if word.isalpha()])

    def made_up(self, rng: random.Random) -> str:
        """Makes up a name of one to six words, some of which are known and some spelled at random."""
        while True:
            words = [self._word(rng) for _ in range(weighted(LENGTHS, rng))]
            if len(words) > 2 and rng.random() < 0.4:
                words[rng.randrange(1, len(words) - 1)] = rng.choice(LINKS)
            if len(words) > 1 and rng.random() < 0.06:
                words[:2] = [f"{words[0]}-{words[1]}"]
            if len(words) > 3 and rng.random() < 0.3:
                words[0] = "The"
            name = " ".join(words)
            if rng.random() < 0.05:
                name = name.lower()
            if unicodedata.is_normalized("NFC", name):
                return name

    def _word(self, rng: random.Random) -> str:
        if rng.random() < 0.03:
            return str(rng.randrange(10 ** rng.randint(1, 4)))
        kind = weighted(SOURCES, rng)
        if kind == "world":
            return rng.choice(self.words)
        word = self.letters.word(rng) if kind == "letters" else rng.choice(self.common)
        if kind == "joined":
            word += rng.choice(self.common).lower()
        if rng.random() < 0.05:
            letter = rng.choice(word)
            word = word.replace(letter, ACCENTS.get(letter, letter), 1)
        return word if kind == "list" and rng.random() < 0.2 else word[:1].upper() + word[1:]

    def targets(self, fact: Fact, count: int, rng: random.Random) -> list[str]:
        """Draws answers to change a fact to; never the one that it has, nor the one that it has changed to."""
        others = [answer for answer in self.of[fact.relation] if answer != fact.answer]
        drawn: list[str] = []
        while len(drawn) < count:
            kind = weighted(NEW_ANSWERS, rng)
            answer = self.made_up(rng) if kind == "made up" else rng.choice(others if kind == "alike" else self.known)
            if answer not in (fact.answer, self.now.get(fact.id)):
                drawn.append(answer)
        return drawn


class Letters:
    """Spells new words, each letter drawn by the two before it as in a list of words, or at random."""

    RANDOM = 0.08  # share of letters that the letters before them do not decide

    def __init__(self, words: Sequence[str]):
        self.after: dict[str, Counter[str]] = defaultdict(Counter)
        for word in words:
            spelled = f"  {word.lower()} "
            for i in range(2, len(spelled)):
                self.after[spelled[i - 2 : i]][spelled[i]] += 1

    def word(self, rng: random.Random) -> str:
        while True:
            spelled = "  "
            while len(spelled) < LONGEST_WORD + 2:
                known = self.after.get(spelled[-2:])
                if known is None or rng.random() < self.RANDOM:
                    spelled += rng.choice("abcdefghijklmnopqrstuvwxyz")
                    continue
                letter = rng.choices(list(known), list(known.values()))[0]
                if letter == " ":
                    break
                spelled += letter
            if len(spelled) >= 5:
                return spelled[2:]


def names_to_check() -> list[str]:
    """Reads made-up names that were written by hand. Never trained on."""
    return (Path(__file__).parent / "world-names.txt").read_text(encoding="utf-8").splitlines()
