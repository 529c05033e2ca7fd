"""What every training run has: a folder, a clock, a loop, a schedule, and processes that agree."""

from __future__ import annotations

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from factpatch.errors import FileError, InputError, TrainingError
from factpatch.files import PROBE, check_writable
from factpatch.training.checkpoint import has_checkpoint, stop_signals

TELL_SECONDS = 0.5  # between two looks at a run's figures; each look waits for the device


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
        # Other processes of this run may just be trying whether they can write there.
        there = [path for path in self.path.iterdir() if not path.name.startswith((PROBE, ".nfs"))]
        return has_checkpoint(self.checkpoint) or any(path != self.checkpoint for path in there)

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


class Run(ABC):
    """The loop of a run: update, validate, tell, checkpoint, and stop when asked to."""

    accelerator: Accelerator
    clock: Clock

    def __init__(self, output: str | Path, resume: bool):
        self.folder = RunFolder(output, resume)
        self.resume = resume
        self.step, self.best_step = 0, 0
        self.metrics: list[dict[str, Any]] = []  # a record for each validation

    @abstractmethod
    def _update(self, share: float) -> None:
        """One step, when this share of the run is done."""

    @abstractmethod
    def _validate(self, number: int) -> None:
        """Measures what is held out, and keeps the best."""

    @abstractmethod
    def _tell(self, share: float) -> None:
        """Shows where the run stands."""

    @abstractmethod
    def _checkpoint(self) -> None:
        """Writes all that a resumed run needs."""

    def _loop(self, validations: int, checkpoint_seconds: float) -> None:
        """To the end; or until asked to stop, which is an error to whoever waits for the result."""
        done, _ = sync_progress(self.accelerator, self.clock.share(self.step), False)
        validated = int(done * validations)
        told = saved = time.perf_counter()
        with stop_signals() as asked_to_stop:
            while done < 1 or self.step == 0:
                self._update(done)
                self.step += 1
                done, stop = sync_progress(self.accelerator, self.clock.share(self.step), asked_to_stop.is_set())
                due = int(done * validations) > validated or done >= 1
                now = time.perf_counter()
                if due:
                    validated = int(done * validations)
                    self._validate(validated)
                # Only one process looks, as a look may find that the run is lost; all of them do so at a validation.
                if self.accelerator.is_main_process and (due or now - told > TELL_SECONDS):
                    self._tell(done)
                    told = now
                if stop or now - saved >= checkpoint_seconds:
                    self._checkpoint()
                    saved = time.perf_counter()
                if stop:
                    raise TrainingError(
                        f"stopped on request; go on with --resume, the checkpoint is in {self.folder.checkpoint}"
                    )

    def _rate(self, share: float, warmup: int, kind: str = "linear") -> float:
        """Of the learning rate, at the middle of the step that begins with this share; a warm-up is a tenth at most."""
        steps = self.clock.steps
        return schedule(min(1.0, share + 0.5 / steps), min(0.1, warmup / steps), kind)

    def _check_finite(self, figures: Iterable[float], network: nn.Module) -> None:
        largest = torch.nn.utils.get_total_norm(network.parameters(), math.inf)
        if all(map(math.isfinite, figures)) and largest.isfinite():
            return
        saved = f"the last good checkpoint is in {self.folder.checkpoint}: go on from it with --resume and a lower lr"
        advice = saved if has_checkpoint(self.folder.checkpoint) else "start anew with a lower lr"
        raise TrainingError(f"loss or weights are not finite any more, at step {self.step} or shortly before; {advice}")


def schedule(share: float, warmup: float, kind: str = "linear") -> float:
    """Linear from 0 to 1 over the warm-up's share of a run, then linear to 0, or constant."""
    if share < warmup:
        return share / warmup
    return (1 - share) / (1 - warmup) if kind == "linear" else 1.0


def within_error_of_best(score: float, earlier: Sequence[float], records: int, errors: float = 1.0) -> bool:
    """Whether a later score, a share of so many records, is within so many standard errors of the best.

    The slice is small, and of scores that it cannot tell apart the latest is the one to trust: it has seen the most
    data at the smallest learning rate, where the best of many noisy ones owes most to chance.
    """
    best = max(earlier, default=0.0)
    share = (best * records + 2) / (records + 4)  # Agresti and Coull's: a perfect score has its error too
    return score >= best - errors * math.sqrt(share * (1 - share) / (records + 4))


def sync_progress(accelerator: Accelerator, share: float, stop: bool) -> tuple[float, bool]:
    """Where the run stands and whether it was asked to stop, the same in all processes."""
    if accelerator.num_processes == 1:
        return share, stop
    said = torch.tensor([share, float(stop)], device=accelerator.device, dtype=torch.float64)
    total = summed(accelerator, said).tolist()
    return total[0] / accelerator.num_processes, total[1] > 0


def sum_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Over all processes. Each has divided by the whole batch's size, so the sums are those of one process."""
    if accelerator.num_processes == 1:
        return
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = summed(accelerator, gradient)


def summed(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Over all processes."""
    if accelerator.num_processes == 1:
        return value
    total = accelerator.reduce(value, "sum")
    assert isinstance(total, Tensor)
    return total


def copy_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
