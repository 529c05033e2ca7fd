"""Reads and checks examples to fine-tune on, and groups them into batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factpatch.data.records import Counts, Record, read_records
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.models.rows import Encoded

BUCKET = 50  # number of batches whose examples are sorted by length together


@dataclass(frozen=True)
class Example:
    encoded: Encoded
    target: Any  # a class number or token numbers


def batches_from(examples: list[Example], size: int, seed: int, step: int) -> Iterator[list[Example]]:
    """Yields batches endlessly, starting at any step. Examples of similar length share a batch to save padding."""
    per_epoch = -(-len(examples) // size)
    epoch, position = divmod(step, per_epoch)
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        order = rng.sample(range(len(examples)), len(examples))
        span = BUCKET * size
        buckets = (order[i : i + span] for i in range(0, len(order), span))
        ordered = [i for bucket in buckets for i in sorted(bucket, key=lambda i: len(examples[i].encoded["input_ids"]))]
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        rng.shuffle(batches)
        for batch in batches[position:]:
            yield [examples[i] for i in batch]
        epoch, position = epoch + 1, 0


def read_answered(
    source: str | Path,
    skip_bad: bool,
    labels: Sequence[str] | None = None,
    check: Callable[[Record], object] = lambda record: None,
) -> tuple[list[Record], Counts]:
    """Reads all records with answers, which must be among `labels` if given. `check` raises if a record is bad."""
    counts = Counts()
    known = set(map(normalize, labels or ()))

    def check_all(record: Record) -> None:
        if known and normalize(record.answers[0]) not in known:
            raise InputError(f"expected one of the labels {', '.join(labels or ())}, found {record.answers[0]!r}")
        check(record)

    found = read_records(source, counts, need_answers=True, check=check_all, skip_bad=skip_bad, labels=labels or ())
    return [replace(record, raw={}) for record in found], counts


def labels_of(records: Sequence[Record]) -> list[str]:
    """Returns the labels of all claims, each in its first spelling; capitalisation does not matter."""
    spellings: dict[str, str] = {}
    for record in records:
        label = record.answers[0]
        first = spellings.setdefault(normalize(label), label)
        if label.casefold().split() != first.casefold().split():
            raise InputError(f"labels must differ by more than punctuation, found {first!r} and {label!r}; rename one")
    return list(spellings.values())
