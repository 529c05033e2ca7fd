"""Facts: the edit that is asked for, how answers are compared, and JSON lines."""

import codecs
import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from factpatch.errors import FileError, InputError


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T")
Numbered = TypeVar("Numbered", bound=HasId)

GZIP = b"\x1f\x8b"  # what gzipped files begin with


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


class _Dropped(dict[int, int | None]):
    """For str.translate: None for punctuation, spaces and control characters; filled as characters turn up."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code))[0] in "PZC" else code
        return self[code]


_DROPPED = _Dropped()


@lru_cache(maxsize=1 << 18)  # evaluation compares the same few answers and inputs millions of times
def normalize(text: str) -> str:
    """Lower case, no punctuation, no spaces: the form in which answers and inputs are compared."""
    return text.lower().translate(_DROPPED) or text.strip().lower()


def same(a: str, b: str) -> bool:
    return normalize(a) == normalize(b)


@dataclass(frozen=True)
class Revision:
    """An input with all that training and evaluation need to know of it, as `factpatch revise` writes it."""

    id: str
    input: str
    prediction: str  # the model's own
    alternatives: tuple[str, ...]  # what it could be edited to say, most likely first
    rephrases: tuple[str, ...]  # generated; the model says the same to each
    human_rephrases: tuple[str, ...]  # written by people; likewise
    answers: tuple[str, ...]  # gold

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def read_revisions(path: str | Path, on_bad: Callable[[str], object] | None = None) -> Iterator[Revision]:
    """Streams a revision file."""
    return read_jsonl(path, _parse_revision, on_bad)


def _parse_revision(record: dict[str, Any]) -> Revision:
    lists = [text_list(record, key) for key in ("alternatives", "rephrases", "human_rephrases", "answers")]
    return Revision(
        required_text(record, "id"), required_text(record, "input"), required_text(record, "prediction"), *lists
    )


def required_text(record: dict[str, Any], key: str) -> str:
    found = record.get(key)
    if not isinstance(found, str):
        raise InputError(f'expected a text in "{key}", found {json.dumps(found)[:60]}')
    return found


def read_edits(path: str | Path, skip_bad: bool = False) -> tuple[list[FactEdit], int]:
    """Facts to edit, one `{"input": ..., "target": ...}` a line, and the number of bad lines that were passed over."""
    bad: list[str] = []
    edits = list(read_jsonl(path, _parse_edit, bad.append if skip_bad else None))
    if not edits:
        raise InputError(f'{path}: expected at least one fact, found none; write {{"input": ..., "target": ...}} lines')
    return edits, len(bad)


def _parse_edit(record: dict[str, Any]) -> FactEdit:
    prediction = record.get("prediction")
    known = prediction if isinstance(prediction, str) else None
    return FactEdit(x=required_text(record, "input"), a=required_text(record, "target"), y=known)


def read_jsonl(
    path: str | Path, parse: Callable[[dict[str, Any]], T], on_bad: Callable[[str], object] | None = None
) -> Iterator[T]:
    """Streams the records of a JSON lines file, or of a file that is one JSON array, through `parse`; plain or gzipped.

    A bad record raises an InputError that names its line, or, where `on_bad` is given, is told to it and passed over.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for place, content in _pieces(file, path):
                try:
                    yield parse(_decode(content))
                except InputError as error:
                    message = f"{path}, {place}: {error}"
                    if on_bad is None:
                        raise InputError(f"{message}; mend it, or pass over bad records with --skip-bad") from None
                    on_bad(message)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read {path}: {reason}; expected a JSON lines file, plain or .gz") from error


def _pieces(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Where a record stands, and its bytes; or the record itself, where the file is one array, to be read whole."""
    first = True
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if number == 1 and line.startswith(GZIP):
            raise FileError(
                f"cannot read {path}: expected JSON lines, found gzip; give the file a name that ends in .gz"
            )
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            try:
                array = json.loads(b"\n" * (number - 1) + line + file.read())
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: expected JSON lines or a JSON array, found a damaged one: {error}") from None
            yield from ((f"record {i}", record) for i, record in enumerate(array, start=1))
        else:
            yield f"line {number}", line
        first = False


def _decode(content: bytes | dict[str, Any]) -> dict[str, Any]:
    try:
        record = json.loads(content.decode("utf-8").rstrip("\r\n")) if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise InputError(f"expected UTF-8, found byte 0x{found:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"expected a JSON object, found a syntax error at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a JSON object, found one that cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object, found {type(record).__name__}")
    may_have = isinstance(content, dict) or b"\\ud" in content.lower()
    if may_have and _has_lone_surrogates(record):
        raise InputError("expected Unicode text, found half of a surrogate pair, as in a cut emoji")
    return record


def _has_lone_surrogates(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def by_lot(facts: Iterable[Numbered], seed: int) -> list[Numbered]:
    """In an order that the seed and each one's id decide, whatever else is in the file."""
    return sorted(facts, key=lambda fact: hashlib.sha256(f"{seed}/{fact.id}".encode(errors="replace")).digest())


def text_list(record: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts in a record; nothing where it has none."""
    found = record.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f'expected a list of texts in "{key}", found {json.dumps(found)[:60]}')
    return tuple(found)
