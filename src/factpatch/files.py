"""Writing files and folders atomically: a crash leaves either the old content or the new one."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from factpatch.errors import FileError

if TYPE_CHECKING:
    from torch import Tensor

ABANDONED_SECONDS = 24 * 3600  # age at which a scratch file belongs to a process that was killed
MOST_TEXT = 1 << 30  # bytes in a text file that is read as a whole
PROBE = ".factpatch-"  # prefix of the files that `check_writable` creates and removes


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`; the file written there replaces `path` when the block ends without error."""
    path = checked_target(path)
    with as_file_errors(path), _scratch_folder(path.parent, _scratch_prefix(path)) as folder:
        scratch = folder / path.name
        scratch.touch()
        yield scratch
        _sync(scratch, path)
        os.replace(scratch, path)


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yields a scratch path beside `path`; the file written there becomes `path`, unless `path` exists by then."""
    path = checked_target(path)
    with as_file_errors(path), _scratch_folder(path.parent, _scratch_prefix(path)) as folder:
        yield folder / path.name
        _sync(folder / path.name)
        with suppress(FileExistsError):
            os.link(folder / path.name, path)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a scratch folder beside `path` that is moved to `path` when the block ends without error.

    An existing folder is replaced if it has only files of the same names. Any other folder is refused, because its
    files would be lost.
    """
    with as_file_errors(Path(path)):
        path = _resolved(Path(path))
        if path.exists() and not path.is_dir():
            raise FileError(f"expected a folder to write, found a file at {path}; name a folder")
        with _scratch_folder(path.parent, _scratch_prefix(path)) as scratch:
            yield scratch
            for file in scratch.rglob("*"):
                if file.is_file():
                    _sync(file)
            _refuse_foreign_files(path, {file.name for file in scratch.iterdir()})
            scratch.chmod(0o777 & ~_umask())
            _move_folder(scratch, path)


@contextmanager
def files_into(folder: str | Path) -> Iterator[Path]:
    """Yields a scratch folder whose files are moved into `folder`, one by one, when the block ends without error.

    Other files of `folder` are kept. If a move fails, the error lists which files were replaced and which were not.
    """
    folder = Path(folder)
    with as_file_errors(folder), _scratch_folder(folder, ".new.") as scratch:
        yield scratch
        files = sorted(scratch.iterdir())
        for file in files:
            _sync(file, folder / file.name)
        _move_files(files, folder)


@contextmanager
def _scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a temporary folder inside `parent`, and removes those that killed processes left there."""
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent, prefix)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def _sweep(folder: Path, prefix: str) -> None:
    """Removes scratch folders that a killed process left. Recent ones are kept: another process may be using them."""
    for left in folder.glob(f"{glob.escape(prefix)}????????"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() and not left.is_symlink() else left.unlink()


def _scratch_prefix(path: Path) -> str:
    """Returns the prefix of the names of scratch folders for a path.

    Long names are cut: a file name has at most 255 bytes, and a character takes up to four.
    """
    return f".{path.name[:50]}."


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
                f"not replaced: {', '.join(names[done:])}. Fix this and try again"
            ) from error


def _refuse_foreign_files(folder: Path, ours: set[str]) -> None:
    existing = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    if foreign := sorted(existing - ours):
        raise FileError(f"{folder} contains other files, such as {foreign[0]}; name a new folder")


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


def _sync(path: Path, target: Path | None = None) -> None:
    """Flushes a file to the disk and gives it the permissions of its target or, if there is none, of a new file.

    Some libraries create private files.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    mode = target.stat().st_mode if target and target.is_file() else 0o666 & ~_umask()
    path.chmod(mode & 0o777)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors and metadata to one safetensors file. The same content always gives the same bytes."""
    from safetensors.torch import save_file

    with atomic_file(path) as scratch:
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, scratch, dict(metadata))
        _sort_metadata(scratch)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in the header of a safetensors file, which otherwise has a random order in each process."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) <= size:  # the tensors follow and keep their place
            file.seek(8)
            file.write(content.ljust(size))


def read_safetensors(path: str | Path, kind: str, *forms: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Reads the metadata and the tensors of one of our files, whose metadata must name one of the formats `forms`.

    `kind` says in errors what was expected, such as "patch".
    """
    try:
        if Path(path).is_dir():
            raise FileError(f"expected a {kind} file, found a folder at {path}; name the file")
        refuse_device(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FileError(f"no {kind} file at {path}; check the path") from None
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a readable {kind} file; it may be truncated ({error})") from error
    if (actual := metadata.get("format", "none")) not in forms:
        expected = " or ".join(forms)
        raise FileError(f"{path} is not a {kind} file: expected format {expected}, found {actual}; check the path")
    return metadata, tensors


def refuse_device(path: str | Path) -> None:
    """Raises a FileError for a device or a pipe, also behind a link: reading it may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # reading the file will report it
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"expected a file, found a device or a pipe at {path}; write its content to a file first")


def read_text(path: Path) -> str:
    """Reads a small text file, such as a config.json, that may come from somebody else."""
    refuse_device(path)
    if path.is_file() and path.stat().st_size > MOST_TEXT:
        raise FileError(f"expected at most {MOST_TEXT:,} bytes in {path}, found more")
    return path.read_text(encoding="utf-8")


def check_writable(path: str | Path) -> None:
    """Raises the error that writing to `path` would raise, before long work rather than after it."""
    path = Path(path)
    with as_file_errors(path):
        if not path.is_dir():
            checked_target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent, prefix=PROBE).close()


def refuse_gz(path: str | Path) -> None:
    """Raises a FileError for an output path that ends in .gz: output is never compressed."""
    if Path(path).suffix == ".gz":
        raise FileError(f"expected a plain output file, found {path}; leave out .gz and compress the file afterwards")


def checked_target(path: str | Path) -> Path:
    """Returns the path to write to, with links resolved. Raises a FileError for a folder, a device or a pipe."""
    path = Path(path)
    with as_file_errors(path):
        if path.is_dir():
            raise FileError(f"expected a file to write, found a folder at {path}; name a file")
        target = _resolved(path)
        if path.exists() and not (path.is_file() and target.exists()):  # /dev/stdout can be a file without a name
            raise FileError(f"expected a file to write, found a device or a pipe at {path}; name a file")
        return target


def _resolved(path: Path) -> Path:
    """Resolves a link. Any other path is returned unchanged."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:
        raise FileError(f"cannot write {path}: it is a link that leads back to itself; name another path") from None


def content_hash(path: str | Path) -> str:
    """Returns the sha256 of a file's content."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check the path") from error


@contextmanager
def as_file_errors(path: Path) -> Iterator[None]:
    """Turns errors of the system and of safetensors into FileErrors that name the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot write {path}: {reason}. Nothing was changed there; fix this and try again") from error
