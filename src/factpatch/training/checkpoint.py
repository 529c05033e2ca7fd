"""The folder of a run and its checkpoints: tensors in safetensors files, numbers in JSON, no pickle."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary, finalize

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from factpatch.errors import FileError, InputError
from factpatch.files import PROBE, as_file_errors, atomic_file, atomic_folder, check_writable, read_text, refuse_device

FORMAT = 2  # of checkpoints


class RunFolder:
    """The folder a run writes to. A folder that is in use is refused, and so is resuming without a checkpoint.

    Before it writes, the main process locks the folder, so that two runs cannot write to it at the same time. Within
    one process, a new object takes over the lock of an older one.
    """

    _locked: ClassVar[WeakValueDictionary[Path, Self]] = WeakValueDictionary()

    def __init__(self, output: str | Path, resume: bool):
        self.path, self.resume = Path(output), resume
        self.checkpoint = self.path / "checkpoint"
        stopped = has_checkpoint(self.checkpoint)
        if resume and not stopped:
            finished = "the run there is finished, so choose another --output"
            advice = finished if self._in_use() else "start without --resume"
            raise FileError(f"nothing to resume: expected a checkpoint in {self.checkpoint}; {advice}")
        self._refuse_used()
        check_writable(self.path)
        self.release: Callable[[], object] = lambda: None

    def _refuse_used(self) -> None:
        if not self.resume and self._in_use():
            advice = "resume its run with --resume, or choose" if has_checkpoint(self.checkpoint) else "choose"
            raise FileError(f"{self.path} is in use; {advice} another --output")

    def lock(self) -> None:
        """Creates and locks the folder. Raises a FileError if another run is writing to it, or has written to it."""
        if os.environ.get("RANK", "0") != "0":
            return
        key = self.path.absolute()
        if (older := self._locked.get(key)) is not None:
            older.release()
        with as_file_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY)
        self.release = finalize(self, os.close, folder)  # as at the end of the process, however it ends
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(
                f"another run is writing to {self.path}; wait until it ends, or choose another --output"
            ) from None
        except OSError:
            pass  # a file system without locks
        self._locked[key] = self
        self._refuse_used()

    def _in_use(self) -> bool:
        """Returns True if the folder contains files, other than those of a run killed before its first checkpoint."""
        if not self.path.is_dir():
            return self.path.exists()
        # Other processes of this run may be testing at this moment whether they can write here.
        there = [path for path in self.path.iterdir() if not path.name.startswith((PROBE, ".nfs"))]
        return has_checkpoint(self.checkpoint) or any(path != self.checkpoint for path in there)

    def check_settings(self, saved: Mapping[str, Any], wanted: Mapping[str, Any], changeable: Iterable[str]) -> None:
        """Raises an InputError if a run is resumed with settings that differ and are not `changeable`."""
        compared = wanted.keys() - set(changeable)
        differing = sorted(key for key in compared if wanted[key] != saved.get(key, wanted[key]))
        if differing:
            changes = ", ".join(f"{key} was {saved[key]}, now {wanted[key]}" for key in differing)
            raise InputError(f"the run in {self.path} had other settings: {changes}; resume it with the same ones")

    def sweep(self) -> None:
        """Removes partly written files of a run that was killed; other files stay."""
        written = ("config.json", "metrics.jsonl", "editor", "last", "new")
        half_written = (path for name in written for path in self.path.glob(f".{name}.*"))
        for left in (*half_written, *self.path.glob(".checkpoint"), *self.checkpoint.glob(".step-*")):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)

    def write_records(self, about: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> None:
        """Writes config.json and metrics.jsonl."""
        with atomic_file(self.path / "config.json") as scratch:
            scratch.write_text(json.dumps(about, indent=2) + "\n")
        with atomic_file(self.path / "metrics.jsonl") as scratch:
            scratch.write_text("".join(json.dumps(record) + "\n" for record in metrics))

    def remove_checkpoint(self) -> None:
        """Renames the checkpoint, then removes it, so that a killed process leaves a complete one or none."""
        if self.checkpoint.exists():
            doomed = self.path / ".checkpoint"
            self.checkpoint.rename(doomed)
            shutil.rmtree(doomed)
        self.release()  # the run is finished


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], numbers: dict[str, Any]
) -> None:
    """Writes one file per group of tensors, such as the model's and the optimizer's, and the numbers as JSON.

    Each checkpoint is a new folder that appears in one rename. Older ones are removed afterwards, so that a
    killed run always leaves a complete one.
    """
    with atomic_folder(folder / f"step-{step:09}") as scratch:
        for group, named in tensors.items():
            copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
            save_file(copies, scratch / f"{group}.safetensors")
        (scratch / "state.json").write_text(json.dumps({"format": FORMAT, **numbers}, indent=2) + "\n")
    for older in _checkpoints(folder)[:-1]:
        shutil.rmtree(older)


def load_checkpoint(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Reads the newest checkpoint in a folder."""
    newest = _checkpoints(folder)[-1]
    try:
        numbers = json.loads(read_text(newest / "state.json"))
        if numbers.get("format") == FORMAT:
            for path in newest.glob("*.safetensors"):
                refuse_device(path)
            return {path.stem: load_file(path) for path in newest.glob("*.safetensors")}, numbers
    except (OSError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise FileError(f"cannot read the checkpoint {newest} ({error}); start a new run") from error
    raise FileError(f"{newest} was written by another version of factpatch and cannot be resumed; start a new run")


def has_checkpoint(folder: Path) -> bool:
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the state of an optimizer as named tensors."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_state() -> dict[str, Tensor]:
    """Returns the state of torch's random generators, from which dropout draws."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
