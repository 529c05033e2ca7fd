"""Finds the answers that edits ask for: the model's own alternatives, or answers that it would never give.

- `beam`: the answer that the data names or, if it names none, the other beams or labels of the model.
- `gold`: the correct answers, if the model's prediction is wrong.
- `relation`: answers of other facts of the same relation or, if the relation is unknown, of any other fact.
- `invented`: made-up names of one to six words, none of which occurs in the data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from factpatch.data.revisions import Revision, teachable
from factpatch.errors import InputError
from factpatch.facts import normalize, same
from factpatch.models import Classifier, TaskModel

PER_REVISION = 4  # targets drawn per revision and kind; five beams also give four alternatives
WORDS = (1, 6)  # fewest and most words of an invented name
SYLLABLES = (2, 3)  # of each word
ONSETS = "b br c d dr f g gr h j k kl l m n p pr qu r s st t tr v w z".split()
VOWELS = "a a a e e e i i o o o u u ai ea io ou".split()
CODAS = ("", "", "", "l", "m", "n", "nd", "r", "s", "x")

Texts = tuple[str, ...]
Maker = Callable[[Revision], Texts]  # maps a revision to its targets of one kind


def find_targets(
    model: TaskModel, revisions: Sequence[Revision], kinds: Sequence[str], seed: int = 0
) -> list[tuple[Texts, ...]]:
    """Returns each revision's targets of each kind: answers that the model can give but does not predict."""
    return _find_targets(model, revisions, _makers(model, revisions, kinds, seed))


def _makers(model: TaskModel, revisions: Iterable[Revision], kinds: Sequence[str], seed: int) -> list[Maker]:
    check_kinds(model, kinds)
    return [KINDS[kind](revisions, seed) for kind in kinds]


def _find_targets(model: TaskModel, revisions: Sequence[Revision], makers: Sequence[Maker]) -> list[tuple[Texts, ...]]:
    by_kind = [teachable(model, [replace(r, alternatives=make(r)) for r in revisions]) for make in makers]
    return [tuple(aimed.alternatives for aimed in versions) for versions in zip(*by_kind, strict=True)]


def with_targets(
    model: TaskModel, revisions: Sequence[Revision], kinds: Sequence[str], seed: int = 0
) -> list[Revision]:
    """Returns the revisions that have a target, each with its targets of one kind instead of its alternatives.

    A revision that has targets of several kinds gets one of these kinds at random.
    """
    return [revision for revision in target_chooser(model, revisions, kinds, seed)(revisions) if revision.alternatives]


def target_chooser(
    model: TaskModel, data: Iterable[Revision], kinds: Sequence[str], seed: int = 0
) -> Callable[[Sequence[Revision]], list[Revision]]:
    """Returns a function that replaces the alternatives of some revisions of `data` as `with_targets` does for all.

    Revisions without a target get no alternatives.
    """
    makers = _makers(model, data, kinds, seed)

    def choose(revisions: Sequence[Revision]) -> list[Revision]:
        aimed = []
        for revision, by_kind in zip(revisions, _find_targets(model, revisions, makers), strict=True):
            available = [texts for texts in by_kind if texts]
            chosen = _rng(seed, "kind", revision).choice(available) if available else ()
            aimed.append(replace(revision, alternatives=chosen))
        return aimed

    return choose


def check_kinds(model: TaskModel, kinds: Sequence[str]) -> None:
    """Raises an InputError for kinds of targets that do not exist, or that a classifier cannot have."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"there are no targets called {unknown[0]!r}; choose among {', '.join(KINDS)}")
    if isinstance(model, Classifier) and set(kinds) != {"beam"}:
        raise InputError("a classifier can only be edited to its other labels; leave out targets, or set targets=beam")


def invented_name(rng: random.Random) -> str:
    """Returns a name of one to six words made of syllables, such as "Brounex Dai Kluma"."""
    return " ".join(_invented_word(rng) for _ in range(rng.randint(*WORDS)))


def _invented_word(rng: random.Random) -> str:
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(*SYLLABLES)))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def _alternatives(revisions: Iterable[Revision], seed: int) -> Maker:
    return lambda revision: revision.alternatives if revision.target is None else (revision.target,)


def _gold_answers(revisions: Iterable[Revision], seed: int) -> Maker:
    def make(revision: Revision) -> Texts:
        is_correct = any(same(revision.prediction, answer) for answer in revision.answers)
        return () if is_correct else revision.answers

    return make


def _answers_of_others(revisions: Iterable[Revision], seed: int) -> Maker:
    by_relation: dict[str | None, dict[str, str]] = {}
    for revision in revisions:
        for answer in revision.answers:
            for relation in {revision.relation, None}:  # all answers are listed under None
                by_relation.setdefault(relation, {}).setdefault(normalize(answer), answer)
    answers = {relation: list(texts.values()) for relation, texts in by_relation.items()}

    def make(revision: Revision) -> Texts:
        known = {normalize(t) for t in (revision.prediction, *revision.alternatives, *revision.answers)}
        pool = answers.get(revision.relation, [])
        drawn = _rng(seed, "relation", revision).sample(pool, min(len(pool), PER_REVISION + len(known)))
        return tuple(text for text in drawn if normalize(text) not in known)[:PER_REVISION]

    return make


def _invented_names(revisions: Iterable[Revision], seed: int) -> Maker:
    texts = (text for r in revisions for text in (r.input, r.prediction, *r.alternatives, *r.answers))
    known = {normalize(word) for text in texts for word in text.split()}

    def make(revision: Revision) -> Texts:
        rng = _rng(seed, "invented", revision)
        names: list[str] = []
        while len(names) < PER_REVISION:
            name = invented_name(rng)
            if known.isdisjoint(map(normalize, name.split())):
                names.append(name)
        return tuple(names)

    return make


def _rng(seed: int, purpose: str, revision: Revision) -> random.Random:
    """Returns a generator of its own for each revision, so that its targets do not depend on the order of the file."""
    return random.Random(f"{seed}/{purpose}/{revision.id}")


KINDS: dict[str, Callable[[Iterable[Revision], int], Maker]] = {
    "beam": _alternatives,
    "gold": _gold_answers,
    "relation": _answers_of_others,
    "invented": _invented_names,
}
