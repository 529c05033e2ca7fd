"""Checkpoints without pickle: tensors in safetensors, numbers in JSON, the whole folder swapped in at once."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from factpatch.errors import FileError
from factpatch.files import atomic_folder


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], numbers: dict[str, Any]
) -> None:
    """`tensors` by group, such as the model's and the optimizer's, each a file of its own.

    Each checkpoint is a new folder that appears in one rename; older ones go when it is there, so that whenever a run
    is killed there is a whole one.
    """
    place = folder / f"step-{step:09}"
    with atomic_folder(place) as scratch:
        for group, named in tensors.items():
            save_file(
                {k: v.detach().cpu().contiguous().clone() for k, v in named.items()}, scratch / f"{group}.safetensors"
            )
        (scratch / "state.json").write_text(json.dumps(numbers, indent=2) + "\n")
    for older in _checkpoints(folder)[:-1]:
        shutil.rmtree(older)


def has_checkpoint(folder: Path) -> bool:
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def load_checkpoint(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The newest one."""
    folder = _checkpoints(folder)[-1]
    try:
        numbers = json.loads((folder / "state.json").read_text())
        return {path.stem: load_file(path) for path in folder.glob("*.safetensors")}, numbers
    except (OSError, ValueError, SafetensorError) as error:
        raise FileError(f"no readable checkpoint in {folder} ({error}); start the run anew") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as named tensors; every value that optimizers keep is one, or a number."""
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
    """Of torch's generators, so that dropout goes on where it was."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, so that a run can end its step, write a checkpoint and stop."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals belong to the main thread
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
