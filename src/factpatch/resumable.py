"""Files of lines that a long run writes in batches and can resume after a crash."""

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self
from weakref import WeakValueDictionary, finalize

from factpatch.errors import FileError
from factpatch.files import as_file_errors, atomic_file, checked_target, refuse_gz
from factpatch.jsonl import MAX_LINE

SUM = 17  # length of a checksum, with the space after it


class ResumableLines:
    """A file of lines that is written in batches and can be resumed after a crash.

    Lines are collected in a hidden part file beside `path`, which becomes `path` when `finish` is called. The part
    file's first line records the settings of the run. A run with the same settings resumes after the `done` lines that
    are complete; a run with other settings starts from scratch. `header` is an optional first line of the finished
    file, which is not counted as a line. `seconds` is the total time, including that of interrupted runs.

    Each line of the part file begins with a checksum of itself and all lines before it. Lines that were changed,
    removed or reordered are therefore noticed, and written again from there on.

    With `key`, an existing file is replaced only if its first line is a JSON object with this key: a file that another
    program or command wrote is not overwritten.

    The part file is locked, so that two processes cannot write the same output. Within one process, a new object
    replaces an older one for the same path, whose next write then fails.
    """

    _open: ClassVar[WeakValueDictionary[Path, Self]] = WeakValueDictionary()

    def __init__(self, path: str | Path, settings: dict[str, Any], header: str | None = None, key: str | None = None):
        self.path = checked_target(path)
        self.header = header
        self.part = self.path.with_name(f".{_short(self.path.name)}.part")
        self._time = self.path.with_name(f"{self.part.name}.seconds")
        refuse_gz(self.path)
        if key is not None:
            refuse_other_lines(self.path, key)
        run = json.dumps({"run": settings, "header": header}, sort_keys=True)
        with as_file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            finalize(self, _close, self._file)  # a run that fails releases the lock
            self._start(run.encode() + b"\n")
            self._begin = time.perf_counter() - (self._seconds_before() if self.done else 0.0)

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def _locked(self) -> BinaryIO:
        """Opens and locks the part file. The system releases the lock when the process ends, however it ends."""
        key = self.part.absolute()
        if (older := self._open.get(key)) is not None:
            _close(older._file)
        while True:
            file = open(self.part, "ab", opener=_without_links)  # noqa: SIM115 (stays open)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise self._in_use() from None
            except OSError:
                pass  # a file system without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.part.lstat()):
                    self._open[key] = self
                    return file
            file.close()  # another run has just finished and removed this part file

    def _in_use(self) -> FileError:
        return FileError(f"another run is writing {self.path}; wait until it ends, or choose another --output")

    def _seconds_before(self) -> float:
        """Reads how long earlier runs took; 0 if the file is damaged."""
        try:
            seconds = float(self._time.read_bytes())
        except (FileNotFoundError, ValueError):
            return 0.0
        return seconds if 0 <= seconds < math.inf else 0.0

    def _start(self, run: bytes) -> None:
        """Resumes the run that this first line describes. The lines of any other run are dropped."""
        with self.part.open("rb") as file:
            same_run = file.readline() == run
        if not same_run:
            self._file.truncate(0)
            self._file.write(run)
            self._file.flush()
        self.keep()

    def keep(self, most: int | None = None) -> None:
        """Keeps at most this many lines, and drops all lines from the first damaged one on."""
        with as_file_errors(self.path), self.part.open("rb") as file:
            first = file.readline()
            self.done, self._sum, end = 0, _chained(b"", first), len(first)
            for line in islice(file, most):
                total = _chained(self._sum, line[SUM:])
                if line[:SUM] != total or not line.endswith(b"\n"):
                    break
                self.done, self._sum, end = self.done + 1, total, end + len(line)
            self._file.truncate(end)

    def lines(self) -> Iterator[str]:
        """Yields the lines that have been written so far."""
        with self.part.open("rb") as file:
            file.readline()
            yield from (line[SUM:].decode().removesuffix("\n") for line in file)

    def write(self, lines: list[str]) -> None:
        if self._file.closed:
            raise self._in_use()
        with as_file_errors(self.path):
            for line in lines:
                content = f"{line}\n".encode()
                self._sum = _chained(self._sum, content)
                self._file.write(self._sum + content)
            self._file.flush()
            os.fsync(self._file.fileno())
            with open(self._time, "w", opener=_without_links) as file:
                file.write(f"{self.seconds():.3f}")

    def finish(self) -> None:
        """Writes the header and all lines to `path` and removes the part file."""
        if self._file.closed:
            raise self._in_use()
        with atomic_file(self.path) as scratch, scratch.open("wb") as out, self.part.open("rb") as lines:
            if self.header is not None:
                out.write(self.header.encode() + b"\n")
            lines.readline()
            out.writelines(line[SUM:] for line in lines)
        with as_file_errors(self.path):
            self.part.unlink(missing_ok=True)
            self._time.unlink(missing_ok=True)
        self._file.close()


def _close(file: BinaryIO) -> None:
    """Closes a file and ignores errors: a full disk has already been reported."""
    with suppress(OSError):
        file.close()


def _chained(before: bytes, line: bytes) -> bytes:
    """Returns a line's checksum, which covers all lines before it too."""
    return hashlib.sha256(before + line).hexdigest()[: SUM - 1].encode() + b" "


def _without_links(path: str, flags: int) -> int:
    """Opens a file, but not through a link: in a shared folder, another user could have put one there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _short(name: str) -> str:
    """Shortens a name that is too long for a part file."""
    return name if len(os.fsencode(name)) < 240 else f"{name[:40]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def refuse_other_lines(path: Path, key: str) -> None:
    """Raises a FileError for an existing file whose first line is not a JSON object with this key.

    An empty file is accepted.
    """
    if not path.exists():
        return
    with as_file_errors(path), path.open("rb") as file:
        first = file.readline(MAX_LINE)
    try:
        record = json.loads(first or "{}")
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or (first and key not in record):
        raise FileError(f"{path} is not a file that this command wrote, so it is not replaced; choose another --output")
