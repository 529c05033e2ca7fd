"""Splitting facts into train and dev (the paper's re-split of zsRE, appendix): facts, not questions, are split.

The published split keeps relations apart, which suits relation extraction; to edit facts, both parts need all
relations. All questions of a fact, and all records of one subject and relation, stay on one side, and each relation
gives the same share.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from factpatch.data.records import Record
from factpatch.errors import InputError
from factpatch.files import atomic_file, refuse_gz


@dataclass(frozen=True)
class Split:
    train: list[Record]
    dev: list[Record]

    def counts(self) -> dict[str, int]:
        return {
            f"{part}_{what}": number
            for part, records in (("train", self.train), ("dev", self.dev))
            for what, number in (
                ("facts", len(records)),
                ("questions", sum(len(r.questions) for r in records)),
                ("relations", len({r.relation for r in records})),
            )
        }


def split_facts(records: Iterable[Record], share: float, seed: int) -> Split:
    """Puts `share` of the facts of each relation into dev."""
    if not 0 < share < 1:
        raise InputError(f"expected a share between 0 and 1, found {share}")
    facts: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        facts[record.relation or ""][record.subject or record.id].append(record)
    chance = random.Random(seed)
    split = Split([], [])
    owed = 0.0  # carries what rounding left over from relation to relation, so that small relations count too
    for relation in sorted(facts):
        subjects = sorted(facts[relation])
        chance.shuffle(subjects)
        owed += share * len(subjects)
        taken = min(len(subjects), int(owed + 1e-9))
        owed -= taken
        for i, subject in enumerate(subjects):
            (split.dev if i < taken else split.train).extend(facts[relation][subject])
    if not split.train or not split.dev:
        raise InputError(
            f"{len(split.train)} facts for train and {len(split.dev)} for dev: too few to split at {share}"
        )
    return split


def write_split(split: Split, train: str | Path, dev: str | Path) -> None:
    """Both files whole, in KILT's form with the question as input."""
    if Path(train).resolve() == Path(dev).resolve():
        raise InputError(f"expected two files, found {train} for both train and dev; name another one for dev")
    refuse_gz(train)
    refuse_gz(dev)
    with atomic_file(train) as train_scratch, atomic_file(dev) as dev_scratch:
        for records, scratch in ((split.train, train_scratch), (split.dev, dev_scratch)):
            with scratch.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record.to_dict(), ensure_ascii=False) + "\n" for record in records)
