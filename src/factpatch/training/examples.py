"""Examples to learn from: read, held out, and put into batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factpatch.data.records import Counts, Record, read_records
from factpatch.errors import InputError
from factpatch.models import Classifier, TaskModel
from factpatch.models.base import Encoded

BUCKET = 50  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class Example:
    encoded: Encoded
    target: Any  # a class number or token numbers


def hold_out(records: list[Record], most: int, seed: int) -> tuple[list[Record], list[Record]]:
    """A slice of train for choosing, and the rest for training."""
    shuffled = random.Random(seed).sample(records, len(records))
    size = min(most, len(records) // 10)
    if size == 0:
        raise InputError(f"expected at least 10 records to train on, found {len(records)}")
    return shuffled[:size], shuffled[size:]


def batches_from(examples: list[Example], size: int, seed: int, step: int) -> Iterator[list[Example]]:
    """Batches without end, from the given step on. Examples of like length share one, so that little is padding."""
    per_epoch = -(-len(examples) // size)
    epoch, position = divmod(step, per_epoch)
    while True:
        chance = random.Random(f"{seed}/{epoch}")
        order = chance.sample(range(len(examples)), len(examples))
        span = BUCKET * size
        buckets = (order[i : i + span] for i in range(0, len(order), span))
        ordered = [i for bucket in buckets for i in sorted(bucket, key=lambda i: len(examples[i].encoded["input_ids"]))]
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        chance.shuffle(batches)
        for batch in batches[position:]:
            yield [examples[i] for i in batch]
        epoch, position = epoch + 1, 0


def read_answered(source: str | Path, skip_bad: bool, model: TaskModel | None = None) -> tuple[list[Record], Counts]:
    """All records with answers; with a classifier given, its labels only."""
    counts = Counts()

    def check(record: Record) -> None:
        if isinstance(model, Classifier):
            model.check_target(record.answers[0])

    records = [
        replace(r, raw={}) for r in read_records(source, counts, need_answers=True, check=check, skip_bad=skip_bad)
    ]
    return records, counts
