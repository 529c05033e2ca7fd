"""From a data file to a file of lines, chunk by chunk: what `paraphrase` and `revise` share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from factpatch.data.records import Counts, Record, read_records, refuse_overwriting, source_hash
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
    labels: Collection[str] = (),
) -> Counts:
    """Writes `work(prepare(records))`, a line for each record.

    A chunk is read and prepared while the one before is worked on, so that a GPU need not wait for it. A killed run
    with the same settings goes on where it stopped. `on_done` is told of all records that were read, used or not.
    """
    refuse_overwriting(output, source)
    settings = {"data": source_hash(source), **settings}
    counts = Counts()
    records = read_records(source, counts, check=check, skip_bad=skip_bad, labels=labels)
    first = list(islice(records, size))  # before anything is opened: a bad record among them leaves no trace
    lines = ResumableLines(output, settings, size)
    records = chain(first, records)

    def read() -> tuple[T, int] | None:
        chunk = list(islice(records, size))
        return (prepare(chunk), counts.read) if chunk else None

    for _ in islice(records, lines.done):
        pass
    done = counts.read if lines.done else 0
    on_done(done)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(read)
        while (chunk := following.result()) is not None:
            following = thread.submit(read)
            prepared, place = chunk
            lines.write(work(prepared))
            on_done(place - done)
            done = place
    if counts.read > done:  # what was left out after the last chunk
        on_done(counts.read - done)
    lines.finish()
    return counts
