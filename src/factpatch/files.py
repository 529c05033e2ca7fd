"""Writing files and folders atomically: a crash leaves either the old content or the new one."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self
from weakref import WeakValueDictionary, finalize

from safetensors import SafetensorError, safe_open

from factpatch.errors import FileError

PROBE = ".factpatch-"  # prefix of the files that `check_writable` creates and removes


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`; the file written there replaces `path` when the block ends without error."""
    path = _checked_target(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        scratch = Path(name)
        try:
            yield scratch
            _sync(scratch)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a scratch folder beside `path` that is moved to `path` when the block ends without error.

    An existing folder is replaced if it has only files of the same names. Any other folder is refused, because its
    files would be lost.
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
                    _sync(file)
            _refuse_foreign_files(path, {file.name for file in scratch.iterdir()})
            scratch.chmod(0o777 & ~_umask())
            _move_folder(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def files_into(folder: str | Path) -> Iterator[Path]:
    """Yields a scratch folder whose files are moved into `folder`, one by one, when the block ends without error.

    Other files of `folder` are kept. If a move fails, the error lists which files were replaced and which were not.
    """
    folder = Path(folder)
    with _as_file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".new."))
        try:
            yield scratch
            files = sorted(scratch.iterdir())
            for file in files:
                _sync(file)
            _move_files(files, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _move_files(files: list[Path], folder: Path) -> None:
    for done, file in enumerate(files):
        try:
            os.replace(file, folder / file.name)
        except OSError as error:
            if done == 0:
                raise
            names = [one.name for one in files]
            raise FileError(
                f"cannot write {folder / file.name}: {error.strerror}. Replaced: {', '.join(names[:done])}; "
                f"not replaced: {', '.join(names[done:])}. Free the path and try again"
            ) from error


class ResumableLines:
    """A file of lines that is written chunk by chunk and can be resumed after a crash.

    Lines are collected in a hidden part file beside `path`, which becomes `path` when `finish` is called. The part
    file's first line records the settings of the run. A run with the same settings resumes after the last complete
    chunk, so that it produces the same chunks, and therefore the same lines, as a run that was never interrupted. A
    run with other settings starts from scratch. `header` is an optional first line of the finished file, which is not
    counted as a line. `seconds` is the total time, including that of interrupted runs.

    The part file is locked, so that two processes cannot write the same output. Within one process, a new object
    replaces an older one for the same path, whose next write then fails.
    """

    _open: ClassVar[WeakValueDictionary[Path, Self]] = WeakValueDictionary()

    def __init__(self, path: str | Path, settings: dict[str, Any], chunk: int, header: str | None = None):
        self.path = _checked_target(path)
        self.chunk = chunk
        self.header = header
        self.part = self.path.with_name(f".{self.path.name}.part")
        self._time = self.path.with_name(f".{self.path.name}.part.seconds")
        refuse_gz(self.path)
        run = json.dumps({"run": {**settings, "chunk": chunk}, "header": header}, sort_keys=True)
        with _as_file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            finalize(self, self._file.close)  # a run that fails releases the lock
            self.done = self._resume(run.encode() + b"\n")
            spent = self._time.read_text() if self.done and self._time.exists() else ""
        self._begin = time.perf_counter() - float(spent or 0)

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def _locked(self) -> BinaryIO:
        """Opens and locks the part file. The system releases the lock when the process ends, however it ends."""
        key = self.part.absolute()
        if (older := self._open.get(key)) is not None:
            older._file.close()
        while True:
            file = self.part.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise self._taken() from None
            except OSError:
                pass  # a file system without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.part.stat()):
                    self._open[key] = self
                    return file
            file.close()  # another run has just finished and removed this part file

    def _taken(self) -> FileError:
        return FileError(f"another run is writing {self.path}; wait until it ends, or choose another --output")

    def _resume(self, run: bytes) -> int:
        """Truncates the part file after the last complete chunk of this run, and returns the number of lines in it."""
        self._start = len(run)
        with self.part.open("rb") as file:
            same_run = file.readline() == run
            ends = [self._start]
            for line in file:
                if not line.endswith(b"\n"):
                    break
                ends.append(ends[-1] + len(line))
        if not same_run:
            self._file.truncate(0)
            self._file.write(run)
            self._file.flush()
            return 0
        complete = (len(ends) - 1) // self.chunk * self.chunk
        self._file.truncate(ends[complete])
        return complete

    def keep(self, lines: int) -> None:
        """Keeps only the first `lines` lines, for callers that resume at the start of one of their own batches."""
        with _as_file_errors(self.path), self.part.open("rb") as file:
            for _ in range(1 + lines):
                file.readline()
            self._file.truncate(file.tell())
        self.done = lines

    def lines(self) -> Iterator[str]:
        """Yields the lines that have been written so far."""
        with self.part.open(encoding="utf-8") as file:
            file.readline()
            yield from (line.removesuffix("\n") for line in file)

    def write(self, lines: list[str]) -> None:
        if self._file.closed:
            raise self._taken()
        with _as_file_errors(self.path):
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._time.write_text(f"{self.seconds():.3f}")

    def finish(self) -> None:
        """Writes the header and all lines to `path` and removes the part file."""
        if self._file.closed:
            raise self._taken()
        with atomic_file(self.path) as scratch, scratch.open("wb") as out, self.part.open("rb") as lines:
            if self.header is not None:
                out.write(self.header.encode() + b"\n")
            lines.seek(self._start)
            shutil.copyfileobj(lines, out)
        with _as_file_errors(self.path):
            self.part.unlink(missing_ok=True)
            self._time.unlink(missing_ok=True)
        self._file.close()


def read_safetensors(path: str | Path, kind: str, form: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Reads the metadata and the tensors of one of our files, whose metadata must name the format `form`.

    `kind` says in errors what was expected, such as "patch".
    """
    if Path(path).is_dir():
        raise FileError(f"expected a {kind} file, found a folder at {path}; name the file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileError(f"no {kind} file at {path}; check the path") from None
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a readable {kind} file; it may be truncated ({error})") from error
    if (found := metadata.get("format", "none")) != form:
        raise FileError(f"{path} is not a readable {kind} file: expected format {form}, found {found}")
    return metadata, tensors


def check_writable(path: str | Path) -> None:
    """Raises the error that writing to `path` would raise, before long work rather than after it."""
    path = Path(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent, prefix=PROBE).close()


def refuse_gz(path: str | Path) -> None:
    """Raises a FileError for an output path that ends in .gz: output is never compressed."""
    if Path(path).suffix == ".gz":
        raise FileError(f"expected a plain output file, found {path}; leave out .gz and compress the file afterwards")


def _checked_target(path: str | Path) -> Path:
    """The path to write to, with links resolved. A folder, a device or a pipe raises a FileError."""
    path = Path(path)
    if path.is_dir():
        raise FileError(f"expected a file to write, found a folder at {path}; name a file")
    if path.exists() and not path.is_file():
        raise FileError(f"expected a file to write, found a device or a pipe at {path}; name a file")
    return path.resolve() if path.is_symlink() else path


def _refuse_foreign_files(folder: Path, ours: set[str]) -> None:
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    if foreign := sorted(there - ours):
        raise FileError(f"{folder} contains other files, such as {foreign[0]}; name a new folder")


def content_hash(path: str | Path) -> str:
    """sha256 of a file's content."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check the path") from error


def _move_folder(new: Path, target: Path) -> None:
    """Moves a folder to `target`. An existing folder is set aside first, and restored if the move fails."""
    if not target.exists():
        os.rename(new, target)
        return
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _as_file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(
            f"cannot write {path}: {reason}. Nothing was changed there; free the path and try again"
        ) from error


def _sync(path: Path) -> None:
    """Flushes a file to the disk and gives it the permissions of a new file; some libraries create private ones."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
