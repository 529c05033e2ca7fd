"""Streaming JSON lines from plain or gzipped files, with errors that name the line."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from factpatch.errors import FileError, InputError

T = TypeVar("T")

# In bytes, after unpacking. A few kilobytes of gzip can unpack to gigabytes, which would fill the memory.
MAX_LINE = 64 << 20
MAX_ARRAY = 512 << 20
GZIP = b"\x1f\x8b"  # the first two bytes of every gzip file


def read_jsonl(
    path: str | Path, parse: Callable[[dict[str, Any]], T], on_bad: Callable[[str], object] | None = None
) -> Iterator[T]:
    """Streams the records of a JSON lines file, or of one JSON array, through `parse`. The file may be gzipped.

    A bad record raises an InputError that names its line. With `on_bad`, bad records are skipped instead, and
    `on_bad` is called with the message.
    """
    return (record for _, record in read_numbered(path, parse, on_bad))


def read_numbered(
    path: str | Path, parse: Callable[[dict[str, Any]], T], on_bad: Callable[[str], object] | None = None
) -> Iterator[tuple[str, T]]:
    """Streams records like `read_jsonl`, each with its position, such as "facts.jsonl, line 3"."""
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for position, content in _raw_records(file, path):
                try:
                    record = parse(_decode(content))
                except InputError as error:
                    message = f"{path}, {position}: {error}"
                    if on_bad is None:
                        raise InputError(f"{message}; fix it, or skip bad records with --skip-bad") from None
                    on_bad(message)
                else:
                    yield f"{path}, {position}", record
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read {path}: {reason}; expected a JSON lines file, plain or .gz") from error


def _raw_records(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Yields each record's position, such as "line 3", and its bytes; for a JSON array, the decoded record."""
    first = True
    for number, line in enumerate(_lines(file), start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if number == 1 and line.startswith(GZIP):
            raise FileError(
                f"cannot read {path}: expected JSON lines, found gzip; rename the file so that it ends in .gz"
            )
        if len(line) <= MAX_LINE and not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            line += file.read(MAX_ARRAY - len(line) + 1)
            if len(line) > MAX_ARRAY:
                raise InputError(f"{path}: the JSON array has more than {MAX_ARRAY:,} bytes; write one record per line")
            try:
                array = json.loads(b"\n" * (number - 1) + line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: expected JSON lines or a JSON array, found a damaged one: {error}") from None
            yield from ((f"record {i}", record) for i, record in enumerate(array, start=1))
        else:
            yield f"line {number}", line
        first = False


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file. Of a line that is too long, only slightly more than MAX_LINE bytes are read."""
    while line := file.readline(MAX_LINE + 1):
        yield line
        while len(line) > MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE + 1)  # skips the rest


def _decode(content: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(content, bytes) and len(content) > MAX_LINE:
        raise InputError(f"expected at most {MAX_LINE:,} bytes, found more")
    try:
        record = json.loads(content.decode("utf-8").rstrip("\r\n")) if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"expected UTF-8, found byte 0x{byte:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"expected a JSON object, found a syntax error at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a JSON object, found one that cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object, found {type(record).__name__}")
    may_have_surrogates = isinstance(content, dict) or b"\\ud" in content.lower()
    if may_have_surrogates and _has_lone_surrogates(record):
        raise InputError("expected Unicode text, found half of a surrogate pair, as in a truncated emoji")
    return record


def _has_lone_surrogates(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def required_text(record: dict[str, Any], key: str) -> str:
    """Returns the text under this key of a record. Raises an InputError if there is none."""
    text = record.get(key)
    if not isinstance(text, str):
        raise InputError(f'expected a text in "{key}", found {json.dumps(text)[:60]}')
    return text


def text_list(record: dict[str, Any], key: str) -> tuple[str, ...]:
    """Returns the texts listed under this key of a record; none if the key is missing."""
    texts = record.get(key)
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f'expected a list of texts in "{key}", found {json.dumps(texts)[:60]}')
    return tuple(texts)
