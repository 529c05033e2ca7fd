"""Files of lines that a long run writes chunk by chunk and can resume after a crash."""

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
    """A file of lines that is written chunk by chunk and can be resumed after a crash.

    Lines are collected in a hidden part file beside `path`, which becomes `path` when `finish` is called. The part
    file's first line records the settings of the run. A run with the same settings resumes after the last complete
    chunk, so that it produces the same chunks, and therefore the same lines, as a run that was never interrupted. A
    run with other settings starts from scratch. `header` is an optional first line of the finished file, which is not
    counted as a line. `seconds` is the total time, including that of interrupted runs.

    Each line of the part file begins with a checksum of itself and all lines before it. Lines that were changed,
    removed or reordered are therefore noticed, and written again from there on.

    With `key`, an existing file is replaced only if its first line is a JSON object with this key: a file that another
    program or command wrote is not overwritten.

    The part file is locked, so that two processes cannot write the same output. Within one process, a new object
    replaces an older one for the same path, whose next write then fails.
    """

    _open: ClassVar[WeakValueDictionary[Path, Self]] = WeakValueDictionary()

    def __init__(
        self, path: str | Path, settings: dict[str, Any], chunk: int, header: str | None = None, key: str | None = None
    ):
        self.path = checked_target(path)
        self.chunk = chunk
        self.header = header
        self.part = self.path.with_name(f".{_short(self.path.name)}.part")
        self._time = self.path.with_name(f"{self.part.name}.seconds")
        refuse_gz(self.path)
        if key is not None:
            refuse_other_lines(self.path, key)
        run = json.dumps({"run": {**settings, "chunk": chunk}, "header": header}, sort_keys=True)
        with as_file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            finalize(self, _close, self._file)  # a run that fails releases the lock
            self.done = self._resume(run.encode() + b"\n")
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
                raise self._taken() from None
            except OSError:
                pass  # a file system without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.part.lstat()):
                    self._open[key] = self
                    return file
            file.close()  # another run has just finished and removed this part file

    def _taken(self) -> FileError:
        return FileError(f"another run is writing {self.path}; wait until it ends, or choose another --output")

    def _seconds_before(self) -> float:
        """Reads how long earlier runs took; 0 if the file is damaged."""
        try:
            found = float(self._time.read_bytes())
        except (FileNotFoundError, ValueError):
            return 0.0
        return found if 0 <= found < math.inf else 0.0

    def _resume(self, run: bytes) -> int:
        """Truncates the part file after the last complete chunk of this run, and returns the number of lines in it."""
        self._start = len(run)
        self._sum = _chained(b"", run)
        with self.part.open("rb") as file:
            same_run = file.readline() == run
            complete = self._truncate(file) if same_run else 0
        if not same_run:
            self._file.truncate(0)
            self._file.write(run)
            self._file.flush()
        return complete

    def _truncate(self, file: BinaryIO, most: int | None = None) -> int:
        """Cuts the part file after `most` lines or, by default, after the last complete chunk.

        In any case it is cut before the first damaged line. `file` has been read past its first line. Returns the
        number of lines that are left.
        """
        done, end, last = 0, self._start, self._sum
        position, total = end, last
        for number, line in enumerate(file if most is None else islice(file, most), start=1):
            position, total = position + len(line), _chained(total, line[SUM:])
            if line[:SUM] != total or not line.endswith(b"\n"):
                break
            if most is not None or number % self.chunk == 0:
                done, end, last = number, position, total
        self._file.truncate(end)
        self._sum = last
        return done

    def keep(self, lines: int) -> None:
        """Keeps only the first `lines` lines, for callers that resume at the start of one of their own batches."""
        with as_file_errors(self.path), self.part.open("rb") as file:
            self._sum = _chained(b"", file.readline())
            self.done = self._truncate(file, lines)

    def lines(self) -> Iterator[str]:
        """Yields the lines that have been written so far."""
        with self.part.open("rb") as file:
            file.readline()
            yield from (line[SUM:].decode().removesuffix("\n") for line in file)

    def write(self, lines: list[str]) -> None:
        if self._file.closed:
            raise self._taken()
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
            raise self._taken()
        with atomic_file(self.path) as scratch, scratch.open("wb") as out, self.part.open("rb") as lines:
            if self.header is not None:
                out.write(self.header.encode() + b"\n")
            lines.seek(self._start)
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
        found = json.loads(first or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or (first and key not in found):
        raise FileError(f"{path} is not a file that this command wrote, so it is not replaced; choose another --output")
