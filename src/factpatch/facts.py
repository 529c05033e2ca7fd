"""The edit that a user asks for, and how texts are compared."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from factpatch.errors import InputError
from factpatch.jsonl import read_numbered, required_text


@dataclass(frozen=True)
class FactEdit:
    """An edit ⟨x, y, a⟩: the input, the model's current answer and the wanted answer.

    If `y` is missing, `TaskModel.resolve` fills in the model's own prediction.
    """

    x: str
    a: str
    y: str | None = None
    subject: str | None = None  # the part of x that names what the fact is about, if it is known

    @classmethod
    def from_dict(cls, fields: Any) -> FactEdit:
        """Builds an edit from what `to_dict` returned. Raises a ValueError for anything else."""
        if not isinstance(fields, dict):
            raise ValueError(f"expected an edit, found {type(fields).__name__}")
        for key, value in fields.items():
            if not isinstance(value, str) and not (value is None and key in ("y", "subject")):
                raise ValueError(f"expected a text in {key!r} of an edit, found {type(value).__name__}")
            (value or "").encode()  # raises a ValueError for half of a surrogate pair
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"expected an edit, found other keys: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "subject" or value is not None}


class _Dropped(dict[int, int | None]):
    """Translation table for `str.translate` that drops punctuation, spaces and control characters.

    Entries are filled in the first time a character is seen.
    """

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code))[0] in "PZC" else code
        return self[code]


_DROPPED = _Dropped()


@lru_cache(maxsize=1 << 18)  # evaluation compares the same few answers and inputs millions of times
def normalize(text: str) -> str:
    """Returns the form in which answers and inputs are compared: NFC, lower case, no punctuation, no spaces."""
    text = unicodedata.normalize("NFC", text).lower()
    return text.translate(_DROPPED) or text.strip()


def same(a: str, b: str) -> bool:
    """Returns True if two texts are equal after normalising."""
    return normalize(a) == normalize(b)


def distinct_from(text: str, others: Iterable[str]) -> list[str]:
    """Returns the other texts without copies of `text` or of each other; texts are compared after normalising."""
    kept = {normalize(text): text}
    for other in others:
        kept.setdefault(normalize(other), other)
    return list(kept.values())[1:]


def read_edits(path: str | Path, skip_bad: bool = False) -> tuple[list[FactEdit], int]:
    """Reads facts to edit, one `{"input": ..., "target": ...}` per line. Also returns the number of skipped lines."""
    edits, bad = read_numbered_edits(path, skip_bad)
    return [edit for _, edit in edits], bad


def read_numbered_edits(path: str | Path, skip_bad: bool = False) -> tuple[list[tuple[str, FactEdit]], int]:
    """Reads facts like `read_edits`, each with its position, such as "facts.jsonl, line 3"."""
    bad: list[str] = []
    edits = list(read_numbered(path, _parse_edit, bad.append if skip_bad else None))
    if not edits:
        raise InputError(
            f'{path}: expected at least one fact, found none; write one {{"input": ..., "target": ...}} per line'
        )
    return edits, len(bad)


def _parse_edit(record: dict[str, Any]) -> FactEdit:
    prediction = record.get("prediction")
    y = prediction if isinstance(prediction, str) else None
    return FactEdit(required_text(record, "input"), required_text(record, "target"), y)
