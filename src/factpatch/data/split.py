"""Splits facts into a training and a validation file, as De Cao et al. (2021) re-split zsRE.

The published split of zsRE puts each relation into one part only, which suits relation extraction. Editing facts needs
all relations in both parts. All questions of a fact, and all records with the same subject and relation, stay in one
part, and each relation gives the same share of its facts to the validation file.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from factpatch.data.formats import Record
from factpatch.errors import InputError
from factpatch.files import atomic_file, refuse_gz


@dataclass(frozen=True)
class Split:
    """The two parts of a data set."""

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
    rng = random.Random(seed)
    split = Split([], [])
    owed = 0.0  # dev facts still due after rounding, carried over so that small relations contribute too
    for relation in sorted(facts):
        subjects = sorted(facts[relation])
        rng.shuffle(subjects)
        owed += share * len(subjects)
        in_dev = min(len(subjects), int(owed + 1e-9))
        owed -= in_dev
        for i, subject in enumerate(subjects):
            (split.dev if i < in_dev else split.train).extend(facts[relation][subject])
    if not split.train or not split.dev:
        raise InputError(
            f"a share of {share} leaves {len(split.train)} facts for train and {len(split.dev)} for dev; "
            "add records or change --share"
        )
    return split


def write_split(split: Split, train: str | Path, dev: str | Path) -> None:
    """Writes both parts in KILT's format."""
    if Path(train).resolve() == Path(dev).resolve():
        raise InputError(f"--train and --dev are the same file, {train}; choose two files")
    refuse_gz(train)
    refuse_gz(dev)
    with atomic_file(train) as train_scratch, atomic_file(dev) as dev_scratch:
        for records, scratch in ((split.train, train_scratch), (split.dev, dev_scratch)):
            with scratch.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record.to_dict(), ensure_ascii=False) + "\n" for record in records)
