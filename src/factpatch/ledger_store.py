"""The ledger's file: one SQLite database that survives crashes and can be used by several processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from factpatch.deltas import Delta
from factpatch.errors import FileError, InputError, LedgerInUseError
from factpatch.facts import FactEdit, normalize
from factpatch.patch import Patch, deltas_from

VERSION = 1  # of the file format, stored as SQLite's user_version
APPLICATION = 0x46504C31  # SQLite's application_id, which marks a file as a ledger
LOCK_SECONDS = 60.0  # how long to wait for another process that is writing
IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    x TEXT NOT NULL,
    form TEXT NOT NULL,
    before TEXT NOT NULL,
    target TEXT NOT NULL,
    paraphrases TEXT NOT NULL,
    note TEXT NOT NULL,
    added TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('active', 'removed', 'replaced'))
);
CREATE UNIQUE INDEX one_active_fact_per_input ON facts (form) WHERE status = 'active';
CREATE TABLE patches (fact INTEGER PRIMARY KEY REFERENCES facts (id), method TEXT NOT NULL, tensors BLOB NOT NULL);
CREATE TABLE token_rows (fact INTEGER PRIMARY KEY REFERENCES facts (id), tensors BLOB NOT NULL);
CREATE TABLE history (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    fact INTEGER NOT NULL REFERENCES facts (id),
    time TEXT NOT NULL,
    event TEXT NOT NULL
);
CREATE TABLE covariance (name TEXT PRIMARY KEY, tensors BLOB NOT NULL);
CREATE TABLE cache (name TEXT PRIMARY KEY, facts TEXT NOT NULL, tensors BLOB NOT NULL);
"""

Status = Literal["active", "removed", "replaced"]
Parsed = TypeVar("Parsed", list[Any], dict[str, Any])


@dataclass(frozen=True)
class Fact:
    """One recorded fact: the model should answer `target` to `x`."""

    id: int
    x: str
    before: str  # the unedited model's answer
    target: str
    paraphrases: tuple[str, ...]
    note: str
    added: str  # ISO 8601, UTC
    status: Status

    @property
    def edit(self) -> FactEdit:
        return FactEdit(self.x, self.target, self.before)


@dataclass(frozen=True)
class Event:
    """One entry of a fact's history."""

    time: str
    event: str


class Store:
    """Reads and writes the tables. Every change is made in a transaction, completely or not at all."""

    def __init__(self, path: str | Path, create: bool):
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise FileError(f"no ledger at {self.path}; create one with factpatch ledger init")
        with self._as_file_errors():
            self.db = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)
        try:
            with self._as_file_errors():
                self.db.execute("PRAGMA foreign_keys = ON")
                self._open(create)
        except BaseException:
            self.db.close()
            raise

    def _open(self, create: bool) -> None:
        if not self._pragma("application_id"):
            if not create or self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise FileError(f"{self.path} is not a ledger; create one with factpatch ledger init")
            self.db.execute("PRAGMA journal_mode = WAL")
            with self.transaction():
                if not self._pragma("application_id"):  # another process may have been faster
                    for statement in filter(str.strip, SCHEMA.split(";\n")):
                        self.db.execute(statement)
                    self.db.execute(f"PRAGMA user_version = {VERSION}")
                    self.db.execute(f"PRAGMA application_id = {APPLICATION}")
        if self._pragma("application_id") != APPLICATION:
            raise FileError(f"{self.path} is another program's database, not a ledger; name another file")
        if (version := self._pragma("user_version")) > VERSION:
            raise FileError(
                f"{self.path} has format {version}, this factpatch reads up to {VERSION}; update factpatch to open it"
            )

    def _pragma(self, name: str) -> int:
        return self.db.execute(f"PRAGMA {name}").fetchone()[0]

    def close(self) -> None:
        self.db.close()

    def checkpoint(self) -> None:
        """Moves the content of SQLite's write-ahead log into the file. Closing does so too, but hides errors."""
        with self._as_file_errors():
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _as_file_errors(self) -> Iterator[None]:
        """Turns SQLite's errors into FileErrors."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes damaged names in its messages
            reason = str(error)
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in IN_USE:  # its lowest byte is the kind of error
                message = f"{self.path} is in use by another process; try again when it is done"
                raise LedgerInUseError(message) from error
            if "unable to open" in reason or "readonly" in reason:
                raise FileError(f"cannot open {self.path}: {reason}; check the path and its permissions") from error
            if "full" in reason or "I/O" in reason:
                raise FileError(f"cannot write {self.path}: {reason}; free some space, then try again") from error
            raise FileError(f"{self.path} is damaged or not a ledger ({reason}); restore it from a copy") from error

    @contextmanager
    def transaction(self, write: bool = True) -> Iterator[None]:
        """Makes a `with` block see one state of the ledger; with `write`, no other process can write meanwhile."""
        with self._as_file_errors():
            self.db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def _select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._as_file_errors():
            return self.db.execute(query, values).fetchall()

    def damaged(self, reason: object) -> FileError:
        return FileError(f"{self.path} is damaged ({reason}); restore it from a copy")

    def parsed(self, text: object, kind: type[Parsed]) -> Parsed:
        """Parses the JSON list or object in a table cell."""
        try:
            value = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError) as error:
            raise self.damaged(error) from error
        if not isinstance(value, kind):
            raise self.damaged(f"expected a {kind.__name__} in JSON")
        return value

    # Settings

    def get_meta(self) -> dict[str, str]:
        meta = dict(self._select("SELECT key, value FROM meta"))
        if not all(isinstance(text, str) for pair in meta.items() for text in pair):
            raise self.damaged("a setting is not text")
        return meta

    def set_meta(self, values: Mapping[str, str]) -> None:
        self.db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    # Facts

    def facts(self, status: Status | None = "active") -> list[Fact]:
        """Returns facts in the order in which they were added."""
        return self._facts_where("? IS NULL OR status = ?", status, status)

    def fact(self, fact_id: int) -> Fact:
        if facts := self._facts_where("id = ?", fact_id):
            return facts[0]
        raise InputError(f"there is no fact {fact_id} in {self.path}; see factpatch ledger list")

    def _facts_where(self, condition: str, *values: object) -> list[Fact]:
        columns = "id, x, before, target, paraphrases, note, added, status"
        rows = self._select(f"SELECT {columns} FROM facts WHERE {condition} ORDER BY id", *values)
        return [self._fact(*row) for row in rows]

    def _fact(self, fact_id: int, x: str, before: str, target: str, paraphrases: str, *rest: Any) -> Fact:
        wordings = self.parsed(paraphrases, list)
        if not all(isinstance(text, str) for text in (x, before, target, *wordings, *rest)):
            raise self.damaged(f"fact {fact_id} contains values that are not text")
        return Fact(fact_id, x, before, target, tuple(wordings), *rest)

    def active_ids(self) -> list[int]:
        return [i for (i,) in self._select("SELECT id FROM facts WHERE status = 'active' ORDER BY id")]

    def active_with_input(self, x: str) -> Fact | None:
        """Returns the active fact whose input is the same after normalising, if any."""
        return next(iter(self._facts_where("form = ? AND status = 'active'", normalize(x))), None)

    def insert(
        self, edit: FactEdit, paraphrases: Iterable[str], note: str, patch: Patch, rows: Mapping[str, Tensor]
    ) -> int:
        """Records a new active fact with its patch and the rows that the merge needs."""
        fact_id = self.db.execute(
            "INSERT INTO facts (x, form, before, target, paraphrases, note, added, status)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'active')",
            (edit.x, normalize(edit.x), edit.y or "", edit.a, json.dumps(list(paraphrases)), note, _now()),
        ).lastrowid
        assert fact_id is not None
        self.db.execute("INSERT INTO patches VALUES (?, ?, ?)", (fact_id, patch.method, pack(patch.tensors())))
        self.db.execute("INSERT INTO token_rows VALUES (?, ?)", (fact_id, pack(rows)))
        self.record(fact_id, "added")
        return fact_id

    def retire(self, fact_id: int, status: Status, event: str) -> None:
        """Deactivates a fact. Its record and history stay; its patch is deleted."""
        self.db.execute("UPDATE facts SET status = ? WHERE id = ?", (status, fact_id))
        self.db.execute("DELETE FROM patches WHERE fact = ?", (fact_id,))
        self.record(fact_id, event)

    def record(self, fact_id: int, event: str) -> None:
        self.db.execute("INSERT INTO history (fact, time, event) VALUES (?, ?, ?)", (fact_id, _now(), event))

    def history(self, fact_id: int) -> list[Event]:
        rows = self._select("SELECT time, event FROM history WHERE fact = ? ORDER BY id", fact_id)
        return [Event(str(time), str(event)) for time, event in rows]

    def methods(self) -> set[str]:
        return {str(method) for (method,) in self._select("SELECT DISTINCT method FROM patches")}

    # Tensors

    def patch(self, fact: Fact, base: str) -> Patch:
        rows = self._select("SELECT method, tensors FROM patches WHERE fact = ?", fact.id)
        if not rows:
            raise self.damaged(f"fact {fact.id} has no patch")
        ((method, blob),) = rows
        return Patch(self.deltas(self.unpack(blob)), base, str(method), (fact.edit,))

    def deltas(self, tensors: Mapping[str, Tensor]) -> dict[str, Delta]:
        try:
            return deltas_from(tensors)
        except ValueError as error:
            raise self.damaged(error) from error

    def rows(self, fact_id: int) -> dict[str, Tensor]:
        rows = self._select("SELECT tensors FROM token_rows WHERE fact = ?", fact_id)
        if not rows:
            raise self.damaged(f"fact {fact_id} has no rows")
        return self.unpack(rows[0][0])

    def drop_rows_of_others(self, fact_ids: Iterable[int]) -> None:
        """Deletes the rows of all facts but these: the active ones and those in cached sums."""
        kept = json.dumps(list(fact_ids))
        self.db.execute("DELETE FROM token_rows WHERE fact NOT IN (SELECT value FROM json_each(?))", (kept,))

    def put_covariance(self, moments: Mapping[str, Tensor]) -> None:
        values = ((name, pack({"C": C})) for name, C in moments.items())
        self.db.executemany("INSERT OR REPLACE INTO covariance VALUES (?, ?)", values)

    def covariance(self) -> dict[str, Tensor]:
        stored = {name: self.unpack(blob) for name, blob in self._select("SELECT name, tensors FROM covariance")}
        if not all(isinstance(name, str) and tensors.keys() == {"C"} for name, tensors in stored.items()):
            raise self.damaged("its covariance is incomplete")
        return {name: tensors["C"] for name, tensors in stored.items()}

    def cached(self, name: str) -> tuple[list[int], dict[str, Tensor]] | None:
        """Returns cached tensors, with the ids of the facts that they were computed from."""
        rows = self._select("SELECT facts, tensors FROM cache WHERE name = ?", name)
        return (self._ids(rows[0][0]), self.unpack(rows[0][1])) if rows else None

    def cached_ids(self, name: str) -> list[int]:
        rows = self._select("SELECT facts FROM cache WHERE name = ?", name)
        return self._ids(rows[0][0]) if rows else []

    def _ids(self, text: object) -> list[int]:
        ids = self.parsed(text, list)
        if not all(isinstance(one, int) for one in ids):
            raise self.damaged("a list of facts contains values that are not fact numbers")
        return ids

    def put_cached(self, name: str, fact_ids: list[int], tensors: Mapping[str, Tensor]) -> None:
        blob = pack(tensors)
        self.db.execute("INSERT OR REPLACE INTO cache VALUES (?, ?, ?)", (name, json.dumps(fact_ids), blob))

    def unpack(self, blob: object) -> dict[str, Tensor]:
        try:
            if not isinstance(blob, bytes) or hashlib.sha256(memoryview(blob)[32:]).digest() != blob[:32]:
                raise ValueError("a checksum does not match")
            return load(blob[32:])
        except (SafetensorError, ValueError, KeyError) as error:
            raise self.damaged(error) from error


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialises tensors: a checksum, followed by safetensors."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return hashlib.sha256(content).digest() + content


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
