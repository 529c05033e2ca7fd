"""From a data file to a file of lines, chunk by chunk: what `paraphrase` and `revise` share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from factpatch.data.records import Counts, Record, read_records, source_hash
from factpatch.files import ResumableLines


def write_in_chunks(
    source: str | Path,
    output: str | Path,
    work: Callable[[list[Record]], list[str]],
    *,
    settings: dict[str, Any],
    size: int,
    check: Callable[[Record], object],
    skip_bad: bool,
    on_done: Callable[[int], object],
) -> Counts:
    """Writes `work(records)`, a line for each record. A killed run with the same settings goes on where it stopped."""
    lines = ResumableLines(output, {"data": source_hash(source), **settings}, size)
    counts = Counts()
    records = read_records(source, counts, check=check, skip_bad=skip_bad)
    on_done(sum(1 for _ in islice(records, lines.done)))
    while chunk := list(islice(records, size)):
        lines.write(work(chunk))
        on_done(len(chunk))
    lines.finish()
    return counts
