"""What every training run has: a folder, a clock, a schedule, and processes that agree."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from factpatch.errors import FileError, InputError
from factpatch.files import check_writable
from factpatch.training.checkpoint import has_checkpoint


class RunFolder:
    """Where a run writes. A folder that is in use is refused, and so is resuming what is not there."""

    def __init__(self, output: str | Path, resume: bool):
        self.path = Path(output)
        self.checkpoint = self.path / "checkpoint"
        stopped = has_checkpoint(self.checkpoint)
        if resume and not stopped:
            done = "the run there is done, so choose another --output"
            advice = done if self._in_use() else "start without --resume"
            raise FileError(f"nothing to resume: expected a checkpoint in {self.checkpoint}; {advice}")
        if not resume and self._in_use():
            advice = "go on with its run by --resume, or choose" if stopped else "choose"
            raise FileError(f"{self.path} is in use; {advice} another --output")
        check_writable(self.path)

    def _in_use(self) -> bool:
        """A folder in which a run was killed before its first checkpoint is as good as empty."""
        if not self.path.is_dir():
            return self.path.exists()
        return has_checkpoint(self.checkpoint) or any(path != self.checkpoint for path in self.path.iterdir())

    def check_settings(self, found: Mapping[str, Any], wanted: Mapping[str, Any], free: Iterable[str]) -> None:
        """A run goes on with the settings it had, but for those that are `free` to change, or it would be another."""
        differing = sorted(key for key in wanted if key not in set(free) and wanted[key] != found.get(key))
        if differing:
            changes = ", ".join(f"{key} was {found.get(key)}, now {wanted[key]}" for key in differing)
            raise InputError(f"the run in {self.path} had other settings: {changes}; resume it with the same ones")

    def sweep(self) -> None:
        """Takes away what a kill in the middle of a write has left; what is not ours stays."""
        written = ("config.json", "metrics.jsonl", "editor", "last", "new")
        half_written = (path for name in written for path in self.path.glob(f".{name}.*"))
        for left in (*half_written, *self.path.glob(".checkpoint"), *self.checkpoint.glob(".step-*")):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)

    def remove_checkpoint(self) -> None:
        """In one step, so that a kill leaves either a whole one or none."""
        if not self.checkpoint.exists():
            return
        doomed = self.path / ".checkpoint"
        self.checkpoint.rename(doomed)
        shutil.rmtree(doomed)


class Clock:
    """How much of a run is done: of its steps, or of its time where minutes are given."""

    def __init__(self, steps: int, minutes: float | None, earlier: float = 0.0):
        self.steps = steps
        self.minutes = minutes
        self.begin = time.perf_counter() - earlier

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def share(self, step: int) -> float:
        return step / self.steps if self.minutes is None else min(1.0, self.seconds() / (60 * self.minutes))

    def left(self, share: float) -> float | None:
        """An estimate of the seconds that remain."""
        return self.seconds() * (1 - share) / share if share > 0 else None


def schedule(share: float, warmup: float, kind: str = "linear") -> float:
    """Linear from 0 to 1 over the warm-up's share of a run, then linear to 0, or constant."""
    if share < warmup:
        return share / warmup
    return (1 - share) / (1 - warmup) if kind == "linear" else 1.0


def as_good(score: float, earlier: Sequence[float], records: int, errors: float = 1.0) -> bool:
    """Whether a later score, a share of so many records, is within so many standard errors of the best.

    The slice is small, and of scores that it cannot tell apart the latest is the one to trust: it has seen the most
    data at the smallest learning rate, where the best of many noisy ones owes most to chance.
    """
    best = max(earlier, default=0.0)
    share = (best * records + 2) / (records + 4)  # Agresti and Coull's: a perfect score has its error too
    return score >= best - errors * math.sqrt(share * (1 - share) / (records + 4))


def agree(accelerator: Accelerator, share: float, stop: bool) -> tuple[float, bool]:
    """Where the run stands and whether it was asked to stop, the same in all processes."""
    if accelerator.num_processes == 1:
        return share, stop
    said = torch.tensor([share, float(stop)], device=accelerator.device, dtype=torch.float64)
    total = accelerator.reduce(said, "sum").tolist()  # pyright: ignore (a tensor in, a tensor out)
    return total[0] / accelerator.num_processes, total[1] > 0


def sum_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Over all processes. Each has divided by the whole batch's size, so the sums are those of one process."""
    if accelerator.num_processes == 1:
        return
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = accelerator.reduce(gradient, "sum")  # type: ignore[assignment] (a tensor in, a tensor out)


def copy_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
