"""From a data file to a file of lines, chunk by chunk: what `paraphrase` and `revise` share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from factpatch.data.records import Counts, Record, read_records, source_hash
from factpatch.files import ResumableLines

T = TypeVar("T")


def write_in_chunks(
    source: str | Path,
    output: str | Path,
    prepare: Callable[[list[Record]], T],
    work: Callable[[T], list[str]],
    *,
    settings: dict[str, Any],
    size: int,
    check: Callable[[Record], object],
    skip_bad: bool,
    on_done: Callable[[int], object],
) -> Counts:
    """Writes `work(prepare(records))`, a line for each record.

    A chunk is read and prepared while the one before is worked on, so that a GPU need not wait for it. A killed run
    with the same settings goes on where it stopped.
    """
    lines = ResumableLines(output, {"data": source_hash(source), **settings}, size)
    counts = Counts()
    records = read_records(source, counts, check=check, skip_bad=skip_bad)

    def read() -> T | None:
        chunk = list(islice(records, size))
        return prepare(chunk) if chunk else None

    on_done(sum(1 for _ in islice(records, lines.done)))
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(read)
        while (prepared := following.result()) is not None:
            following = thread.submit(read)
            made = work(prepared)
            lines.write(made)
            on_done(len(made))
    lines.finish()
    return counts
