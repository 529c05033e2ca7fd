"""Work on long lists of texts in several processes: tokenizers written in Python keep a GPU waiting otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")

SLICE = 1000  # texts that one process takes at a time
WORTH_IT = 80 * SLICE  # below, starting processes beside a GPU model takes longer than it saves


class _Slices(Dataset[list[T]]):
    def __init__(self, texts: Sequence[str], work: Callable[[Sequence[str]], list[T]]):
        self.texts, self.work = texts, work

    def __len__(self) -> int:
        return -(-len(self.texts) // SLICE)

    def __getitem__(self, index: int) -> list[T]:
        return self.work(self.texts[index * SLICE : (index + 1) * SLICE])


def map_texts(texts: Sequence[str], work: Callable[[Sequence[str]], list[T]], processes: int | None = None) -> list[T]:
    """`work(texts)`, one result a text, shared among processes where there are many texts and cores to spare."""
    spare = min(8, (os.cpu_count() or 1) - 2) if processes is None else processes
    if spare < 2 or len(texts) < WORTH_IT or sys.platform != "linux":
        return work(texts)
    # DataLoader starts, feeds and ends the processes; they are forked, so the tokenizer need not travel.
    loader = DataLoader(
        _Slices(texts, work),
        batch_size=None,
        num_workers=spare,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",
    )
    return [result for part in loader for result in part]


def _as_it_is(part: list[T]) -> list[T]:
    return part
