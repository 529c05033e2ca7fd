"""Facts: the edit that is asked for, how answers are compared, and JSON lines."""

import gzip
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from factpatch.errors import FileError, InputError

T = TypeVar("T")


@dataclass(frozen=True)
class FactEdit:
    """⟨x, y, a⟩: the input, what the model says now, what it should say.

    `y` may be left out; the model fills it in with its own prediction.
    """

    x: str
    a: str
    y: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no spaces: the form in which answers and inputs are compared."""
    kept = [c for c in text.lower() if unicodedata.category(c)[0] not in "PZC"]
    return "".join(kept) or text.strip().lower()


def same(a: str, b: str) -> bool:
    return normalize(a) == normalize(b)


def read_edits(path: str | Path, skip_bad: bool = False) -> tuple[list[FactEdit], int]:
    """Facts to edit, one `{"input": ..., "target": ...}` a line, and the number of bad lines that were passed over."""
    bad: list[str] = []
    edits = list(read_jsonl(path, _parse_edit, bad.append if skip_bad else None))
    if not edits:
        raise InputError(f'{path}: expected at least one fact, found none; write {{"input": ..., "target": ...}} lines')
    return edits, len(bad)


def _parse_edit(record: dict[str, Any]) -> FactEdit:
    texts = {key: record.get(key) for key in ("input", "target")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise InputError(f'expected a text in "{key}", found {json.dumps(value)}')
    prediction = record.get("prediction")
    return FactEdit(x=record["input"], a=record["target"], y=prediction if isinstance(prediction, str) else None)


def read_jsonl(
    path: str | Path, parse: Callable[[dict[str, Any]], T], on_bad: Callable[[str], object] | None = None
) -> Iterator[T]:
    """Streams the records of a plain or gzipped JSON lines file through `parse`.

    A bad line raises an InputError that names the line, or, where `on_bad` is given, is told to it and passed over.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield parse(_decode(line))
                except InputError as error:
                    message = f"{path}, line {number}: {error}"
                    if on_bad is None:
                        raise InputError(f"{message}; mend the line, or pass over bad lines with --skip-bad") from None
                    on_bad(message)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read {path}: {reason}; expected a JSON lines file, plain or .gz") from error


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8, found byte 0x{line[error.start]:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"expected a JSON object, found a syntax error at column {error.colno}: {error.msg}") from None
    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object, found {type(record).__name__}")
    return record
