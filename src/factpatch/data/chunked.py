"""Writes one line per record of a data file, in chunks, so that `paraphrase` and `revise` can resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from factpatch.data.formats import Record
from factpatch.data.records import Counts, read_records
from factpatch.resumable import ResumableLines

T = TypeVar("T")

FIRST = 2  # records in the first chunk


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
    header: str | None = None,
    key: str | None = None,
) -> Counts:
    """Writes the header, if any, and `work(prepare(records))`, one line per record.

    Each chunk is read and prepared while the previous one is worked on, so that a GPU does not wait for it. After a
    crash, a run with the same settings resumes after the last complete chunk. It therefore makes the same chunks,
    and the same lines, as a run without a crash. An existing file is replaced only if its first line has the `key`.
    `on_done` receives the number of records read since its last call.
    """
    counts = Counts()
    usable = read_records(source, counts, check=check, skip_bad=skip_bad, labels=labels)
    records = ((record, counts.read) for record in usable)
    first = list(islice(records, size))  # read before the output is created, so that a bad record leaves no files
    lines = ResumableLines(output, {**settings, "largest_chunk": size}, header, key)
    records = chain(first, records)
    resumed = 0
    while (end := _chunk_end(resumed, size)) <= lines.done:
        resumed = end
    lines.keep(resumed)
    done = max((read for _, read in islice(records, resumed)), default=0)
    on_done(done)

    def prepared() -> Iterator[tuple[T, int]]:
        start = resumed
        while chunk := list(islice(records, _chunk_end(start, size) - start)):
            start += len(chunk)
            yield prepare([record for record, _ in chunk]), chunk[-1][1]

    for content, read in _computed_ahead(prepared()):
        lines.write(work(content))
        on_done(read - done)
        done = read
    if counts.read > done:  # bad or left-out records after the last chunk
        on_done(counts.read - done)
    lines.finish()
    return counts


def _computed_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields each item while a thread computes the next."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


def _chunk_end(start: int, largest: int) -> int:
    """Returns where the chunk that begins at `start` ends. Sizes double from `FIRST`, so progress shows early."""
    return start + min(start + FIRST, largest)
