"""Writing files so that a crash leaves the old one or the new one, never a half of either."""

import ctypes
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from factpatch.errors import FileError

PROBE = ".factpatch-"  # what the names of files begin with that are made and removed to see whether that can be done


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`; what was written there takes its place if the block ends well."""
    path = _ordinary(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        scratch = Path(name)
        try:
            yield scratch
            _settle(scratch)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """The same for a folder: filled beside its place, then moved there. An older one with the same files is replaced.

    One that holds anything else is refused, as that would be lost.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileError(f"expected a folder to write, found a file at {path}; name a folder")
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield scratch
            for file in scratch.rglob("*"):
                if file.is_file():
                    _settle(file)
            _refuse_strangers(path, {file.name for file in scratch.iterdir()})
            scratch.chmod(0o777 & ~_umask())
            _swap(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def files_into(folder: str | Path) -> Iterator[Path]:
    """Files written side by side, then moved one by one into a folder that holds more than these."""
    folder = Path(folder)
    with _as_file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".new."))
        try:
            yield scratch
            files = sorted(scratch.iterdir())
            for file in files:
                _settle(file)
            for file in files:
                os.replace(file, folder / file.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class ResumableLines:
    """A file of lines that grows beside its place, chunk by chunk, and moves there when it is whole.

    What a killed run had finished is taken up again if the settings are the same, to whole chunks, so that a resumed
    run makes the same chunks, and so the same lines, as one that was never stopped. `seconds` counts all of its starts.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], chunk: int, header: str | None = None):
        self.path = _ordinary(path)
        self._header = b"" if header is None else f"{header}\n".encode()  # the first line, not counted
        self.chunk = chunk
        self.part = self.path.with_name(f".{self.path.name}.part")
        self._settings = self.path.with_name(f".{self.path.name}.part.json")
        self._time = self.path.with_name(f".{self.path.name}.part.seconds")
        self._wanted = json.dumps({**settings, "chunk": chunk}, sort_keys=True)
        refuse_gz(self.path)
        with _as_file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.done = self._take_up()
            self._size = self.part.stat().st_size
            spent = self._time.read_text() if self.done and self._time.exists() else ""
        self._begin = time.perf_counter() - float(spent or 0)

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def _take_up(self) -> int:
        """How many lines are done already; everything after the last whole chunk is cut off."""
        known = self._settings.read_text() if self._settings.exists() and self.part.exists() else None
        if known != self._wanted:
            self.part.write_bytes(self._header)
            self._settings.write_text(self._wanted)
            return 0
        with self.part.open("r+b") as file:
            ends = [file.seek(len(self._header))]
            for line in file:
                if not line.endswith(b"\n"):
                    break
                ends.append(ends[-1] + len(line))
            whole = (len(ends) - 1) // self.chunk * self.chunk
            file.truncate(ends[whole])
        return whole

    def keep(self, lines: int) -> None:
        """Only so many of the lines that are done: a reader that works in batches goes back to a whole one."""
        with _as_file_errors(self.path), self.part.open("r+b") as file:
            file.seek(len(self._header))
            for _ in range(lines):
                file.readline()
            self._size = file.truncate(file.tell())
        self.done = lines

    def write(self, lines: list[str]) -> None:
        self._check_alone()
        with _as_file_errors(self.path), self.part.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()
            self._time.write_text(f"{self.seconds():.3f}")

    def _check_alone(self) -> None:
        """Two runs with one output would mix their lines, or lose them."""
        if not self.part.exists() or self.part.stat().st_size != self._size:
            raise FileError(f"another run is writing {self.path}, or has just done so; choose another --output")

    def finish(self) -> None:
        self._check_alone()
        with _as_file_errors(self.path):
            os.replace(self.part, self.path)
            self._settings.unlink(missing_ok=True)
            self._time.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Raises now what writing there would raise later, after long work."""
    path = Path(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent, prefix=PROBE).close()


def refuse_gz(path: str | Path) -> None:
    if Path(path).suffix == ".gz":
        raise FileError(f"expected a plain output file, found {path}; leave .gz off, and compress it afterwards")


def _ordinary(path: str | Path) -> Path:
    """Where to write a file: through links, but not in place of a folder, a device or a pipe."""
    path = Path(path)
    if path.is_dir():
        raise FileError(f"expected a file to write, found a folder at {path}; name a file")
    if path.exists() and not path.is_file():
        raise FileError(f"expected a file to write, found a device or a pipe at {path}; name a file")
    return path.resolve() if path.is_symlink() else path


def _refuse_strangers(folder: Path, ours: set[str]) -> None:
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    if strangers := sorted(there - ours):
        raise FileError(f"{folder} holds something else ({strangers[0]}); name a new folder")


def content_hash(path: str | Path) -> str:
    """sha256 of a file, to know it again."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check the path") from error


def _swap(new: Path, place: Path) -> None:
    """A folder cannot be renamed over a filled one. Linux can exchange the two; elsewhere the old one steps aside."""
    if not place.exists():
        os.rename(new, place)
        return
    if _exchange(new, place):
        shutil.rmtree(new, ignore_errors=True)  # which is the old one now
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.old."))
    os.rename(place, aside)
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Both names at once, where the system and the file system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@contextmanager
def _as_file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(
            f"cannot write {path}: {reason}. Nothing was changed there; free the path and try again"
        ) from error


def _settle(path: Path) -> None:
    """On the disk, and for everybody to read who may read new files here."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
