"""Reading facts from files and from data sets of the hub, in any of the formats in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factpatch.data.formats import PROVENANCE, Record, parse_counterfact, parse_kilt
from factpatch.errors import FileError, InputError
from factpatch.facts import normalize
from factpatch.files import content_hash
from factpatch.jsonl import read_jsonl

NOT_A_FACT = {normalize("NOT ENOUGH INFO")}  # FEVER's third label: neither SUPPORTS nor REFUTES

# Formats by name, tried from last to first. KILT's is tried last because it accepts or refuses every record.
FORMATS: dict[str, Callable[[dict[str, Any], str], Record | None]] = {
    "kilt": parse_kilt,
    "counterfact": parse_counterfact,
}


def parse_record(raw: dict[str, Any], default_id: str) -> Record:
    """Parses a JSON object in whichever format it has; a record without an id gets `default_id`."""
    parsed = (parse(raw, default_id) for parse in reversed(FORMATS.values()))
    return next(record for record in parsed if record is not None)


@dataclass
class Counts:
    """How many records of a file were used, left out or bad."""

    kept: int = 0
    left_out: int = 0  # claims labelled NOT ENOUGH INFO, unless that is a label to learn
    bad: int = 0  # records that could not be used and were skipped
    ids: set[str] = field(default_factory=set, repr=False)  # ids so far, over several files if they share the counts

    @property
    def read(self) -> int:
        return self.kept + self.left_out + self.bad


def read_records(
    source: str | Path,
    counts: Counts | None = None,
    need_answers: bool = False,
    check: Callable[[Record], object] | None = None,
    skip_bad: bool = False,
    labels: Collection[str] = (),
) -> Iterator[Record]:
    """Streams the records of a file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`.

    A bad record raises an InputError that names its line; with `skip_bad`, it is skipped and counted instead. A record
    is also bad if its id was seen before or if `check` raises an InputError for it. Claims labelled NOT ENOUGH INFO are
    left out and counted, unless that is one of the `labels`.
    """
    counts = Counts() if counts is None else counts
    no_fact = NOT_A_FACT.difference(map(normalize, labels))

    def parse(raw: dict[str, Any]) -> Record | None:
        if raw.keys() == {PROVENANCE}:  # a revision file can be data for another model
            return None
        record = parse_record(raw, f"record-{counts.read + 1}")
        if record.id in counts.ids:
            raise InputError(f"two records have the id {record.id!r}")
        if record.answers and normalize(record.answers[0]) in no_fact:
            counts.ids.add(record.id)
            counts.left_out += 1
            return None
        if need_answers and not record.answers:
            raise InputError('expected an answer in "output", found none')
        if check is not None:
            check(record)
        counts.ids.add(record.id)  # only now: a bad record must not exclude a good one with the same id
        counts.kept += 1
        return record

    def on_bad(message: str) -> None:
        counts.bad += 1

    before = counts.kept
    for record in _parsed(str(source), parse, on_bad if skip_bad else None):
        if record is not None:
            yield record
    if counts.kept == before:
        raise InputError(f"{source}: expected at least one record, found none that can be used")


def _parsed(
    source: str, parse: Callable[[dict[str, Any]], Record | None], on_bad: Callable[[str], object] | None
) -> Iterator[Record | None]:
    if not source.startswith("hub:"):
        yield from read_jsonl(source, parse, on_bad)
        return
    for number, raw in enumerate(_hub_rows(source), start=1):
        try:
            yield parse(raw)
        except InputError as error:
            if on_bad is None:
                raise InputError(f"{source}, row {number}: {error}; skip bad records with --skip-bad") from None
            on_bad(f"{source}, row {number}: {error}")


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError:
        raise InputError(
            "reading from the hub needs the datasets package; install it with pip install 'factpatch[hub]'"
        ) from None
    name, *config, split = source.removeprefix("hub:").split(":") if source.count(":") > 1 else (source[4:], "train")
    try:
        yield from datasets.load_dataset(name, *config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {source}: {error}; expected hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT") from error


def count_records(source: str | Path, skip_bad: bool = False) -> int | None:
    """Counts the records of a file, for a progress bar; returns None for the hub, where counting would need a download.

    All records are parsed, so that a bad one is reported now and not after hours of work. Whether the model can read
    them, and whether NOT ENOUGH INFO is one of its labels, is checked later.
    """
    if str(source).startswith("hub:"):
        return None
    _refuse_pipe(source)
    counts = Counts()
    for _ in read_records(source, counts, skip_bad=skip_bad, labels=NOT_A_FACT):
        pass
    return counts.read


def source_hash(source: str | Path) -> str:
    """Returns the sha256 of a file, or the name of a data set of the hub."""
    if str(source).startswith("hub:"):
        return str(source)
    _refuse_pipe(source)
    return content_hash(source)


def _refuse_pipe(source: str | Path) -> None:
    """Raises a FileError for a pipe, because data is read again after counting or hashing."""
    path = Path(source)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(
            f"expected a file, as the data is read more than once, found a pipe at {source}; write it to a file first"
        )


def refuse_overwriting(output: str | Path, *sources: str | Path) -> None:
    """Raises a FileError if the output is one of the data files, even under another name."""
    for source in map(Path, sources):
        if source.exists() and Path(output).exists() and source.samefile(output):
            raise FileError(f"the output {output} is the data file itself; choose another output")
