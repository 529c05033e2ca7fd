"""Writing files so that a crash leaves the old one or the new one, never a half of either."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factpatch.errors import FileError


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`; what was written there takes its place if the block ends well."""
    path = Path(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        scratch = Path(name)
        try:
            yield scratch
            _flush_to_disk(scratch)
            scratch.chmod(0o666 & ~_umask())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """The same for a folder: filled beside its place, then moved there; an older folder of that name is replaced."""
    path = Path(path)
    with _as_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield scratch
            for file in scratch.rglob("*"):
                if file.is_file():
                    _flush_to_disk(file)
            scratch.chmod(0o777 & ~_umask())
            _swap(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _swap(new: Path, place: Path) -> None:
    """A folder cannot be renamed over a filled one, so the old one steps aside first."""
    if not place.exists():
        os.rename(new, place)
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.old."))
    os.rename(place, aside)
    os.rename(new, place)
    shutil.rmtree(aside)


@contextmanager
def _as_file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"cannot write {path}: {reason}. Nothing was changed there; free the path and try again"
        ) from error


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
