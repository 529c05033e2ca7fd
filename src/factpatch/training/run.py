"""The parts that `fit` and `train` share: clock, loop, checkpoints, schedule and communication between processes."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from factpatch.errors import FileError, TrainingError
from factpatch.training.checkpoint import (
    RunFolder,
    has_checkpoint,
    load_checkpoint,
    optimizer_tensors,
    random_state,
    restore_optimizer,
    restore_random_state,
    save_checkpoint,
)

# Numbers in a checkpoint
CHECKPOINT = {"identity": dict, "step": int, "best_step": int, "seconds": int | float, "metrics": list}
REPORT_SECONDS = 0.5  # between two reports; each of them waits for the device
STOPPING = "stopping after this step; press Ctrl-C again to stop immediately"


class Clock:
    """Measures the progress of a run by its steps or, if minutes are given, by its time.

    The minutes include the set-up before the first step and a `reserve` for what follows the last one.
    """

    def __init__(self, minutes: float | None):
        self.minutes = minutes
        self.begin = time.perf_counter()
        self.reserve = 0.0  # seconds

    def start(self, steps: int, earlier: float = 0.0) -> None:
        """Starts training. `earlier` is the training time of a resumed run before it was interrupted."""
        self.steps = steps
        self.earlier = earlier
        self.setup = time.perf_counter() - self.begin

    def seconds(self) -> float:
        """Returns the duration of the whole run so far."""
        return time.perf_counter() - self.begin + self.earlier

    def training_seconds(self) -> float:
        """Returns the duration of the run so far, without its set-up."""
        return self.seconds() - self.setup

    def share(self, step: int) -> float:
        if self.minutes is None:
            return step / self.steps
        budget = 60 * self.minutes - self.setup - self.reserve
        return min(1.0, self.training_seconds() / budget) if budget > 0 else 1.0

    def seconds_left(self, share: float) -> float | None:
        """Estimates the remaining time."""
        return self.training_seconds() * (1 - share) / share + self.reserve if share > 0 else None


class Run(ABC):
    """A run that updates, validates, reports and writes checkpoints. It can be stopped at any step and resumed.

    Subclasses declare their state in `modules`, `optimizers`, `best` and `identity` before they call `_start`.
    """

    changeable: ClassVar[tuple[str, ...]]  # settings that a resumed run may change

    accelerator: Accelerator
    network: nn.Module  # what is trained
    modules: dict[str, nn.Module]  # everything with a state, the network included
    optimizers: dict[str, torch.optim.Optimizer]
    best: dict[str, Tensor]  # the network's best state
    identity: dict[str, Any]  # settings and hashes that must be equal when the run is resumed

    def __init__(self, output: str | Path, resume: bool, minutes: float | None):
        self.folder = RunFolder(output, resume)
        self.resume = resume
        self.clock = Clock(minutes)
        self.step, self.best_step = 0, 0
        self.validation_seconds, self.last_validation = 0.0, 0.0  # of all validations, and of the last one
        self.metrics: list[dict[str, Any]] = []  # one record per validation

    @abstractmethod
    def _update(self, share: float) -> None:
        """Makes one step; `share` is the progress of the run before it."""

    @abstractmethod
    def _validate(self, number: int) -> None:
        """Measures the network on held-out data and keeps the best one."""

    @abstractmethod
    def _final_seconds(self) -> float:
        """Estimates how long the measurement after the last step takes."""

    @abstractmethod
    def _report(self, share: float) -> None:
        """Shows the state of the run."""

    @abstractmethod
    def _check(self) -> object:
        """Raises a TrainingError if the run has diverged."""

    def _start(self, steps: int) -> None:
        """Starts training, from the beginning or from the checkpoint. From now on, the run writes to its folder."""
        self.folder.lock()
        self.clock.start(steps, self._load_checkpoint() if self.resume else 0.0)

    def _loop(
        self, due_by: Callable[[float], int], checkpoint_seconds: float, validation_share: float | None = None
    ) -> None:
        """Trains to the end. A request to stop raises a TrainingError.

        `due_by` returns how many validations are due when a share of the run is done.
        """
        done, _ = sync_progress(self.accelerator, self.clock.share(self.step), False)
        validated = due_by(done)
        reported = saved = time.perf_counter()
        with stop_signals(self.accelerator.is_main_process) as asked_to_stop:
            while done < 1 or self.step == 0:
                self._update(done)
                self.step += 1
                done, stop = sync_progress(self.accelerator, self.clock.share(self.step), asked_to_stop.is_set())
                due = due_by(done) > validated and self._has_time_to_validate(done, validation_share)
                if due or done >= 1:
                    validated = due_by(done)
                    self._timed_validation(validated)
                # Only the main process reports. If it finds that the run has diverged, it raises; the other processes
                # find out at the next validation.
                now = time.perf_counter()
                if self.accelerator.is_main_process and (due or done >= 1 or now - reported > REPORT_SECONDS):
                    self._report(done)
                    reported = now
                # Without any checkpoint, a run that is killed while it saves its result could not be resumed.
                first_and_last = done >= 1 and not has_checkpoint(self.folder.checkpoint)
                if stop or first_and_last or now - saved >= checkpoint_seconds:
                    self._save_checkpoint()
                    saved = time.perf_counter()
                if stop:
                    raise TrainingError(
                        f"stopped on request; resume with --resume, the checkpoint is in {self.folder.checkpoint}"
                    )

    def _has_time_to_validate(self, done: float, share: float | None) -> bool:
        if share is None or self.clock.minutes is None:
            return True
        return self.validation_seconds + self.last_validation <= share * done * 60 * self.clock.minutes

    def _timed_validation(self, number: int) -> None:
        begin = time.perf_counter()
        self._validate(number)
        mine = torch.tensor(time.perf_counter() - begin, device=self.accelerator.device)
        self.last_validation = float(summed(self.accelerator, mine)) / self.accelerator.num_processes
        self.validation_seconds += self.last_validation
        self.clock.reserve = self.last_validation + self._final_seconds()  # there is a validation after the last step

    def _rate(self, share: float, warmup: int, kind: str = "linear") -> float:
        """Returns the learning-rate factor at the middle of the step that begins at `share`.

        The warm-up is at most a tenth of the run.
        """
        steps = self.clock.steps
        return schedule(min(1.0, share + 0.5 / steps), min(0.1, warmup / steps), kind)

    def _check_finite(self, values: Iterable[float]) -> None:
        largest = torch.nn.utils.get_total_norm(self.network.parameters(), math.inf)
        if all(map(math.isfinite, values)) and largest.isfinite():
            return
        saved = f"resume from the last good checkpoint in {self.folder.checkpoint} with --resume and a lower lr"
        advice = saved if has_checkpoint(self.folder.checkpoint) else "start again with a lower lr"
        raise TrainingError(f"training diverged near step {self.step}: loss or weights are not finite; {advice}")

    # Checkpoints

    def _save_checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self._check()  # a run that has diverged must not overwrite the last good checkpoint
        tensors = {name: module.state_dict() for name, module in self.modules.items()}
        tensors |= {name: optimizer_tensors(optimizer) for name, optimizer in self.optimizers.items()}
        tensors |= {"best": self.best, "random": random_state()}
        numbers = {
            "identity": self.identity,
            "step": self.step,
            "best_step": self.best_step,
            "seconds": self.clock.training_seconds(),
            "metrics": self.metrics,
        }
        save_checkpoint(self.folder.checkpoint, self.step, tensors, numbers)

    def _load_checkpoint(self) -> float:
        """Restores the state of the checkpoint and returns the seconds that were spent by then."""
        if self.accelerator.is_main_process:
            self.folder.sweep()
        tensors, numbers = load_checkpoint(self.folder.checkpoint)
        try:
            return self._restore(tensors, numbers)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise FileError(
                f"the checkpoint in {self.folder.checkpoint} is damaged ({reason}); start a new run"
            ) from error

    def _restore(self, tensors: dict[str, dict[str, Tensor]], numbers: dict[str, Any]) -> float:
        for key, kind in CHECKPOINT.items():
            if not isinstance(numbers[key], kind):
                raise ValueError(f"{key} is {numbers[key]!r}")
        if not all(isinstance(record, dict) and isinstance(record.get("step"), int) for record in numbers["metrics"]):
            raise ValueError("its metrics are not records")
        self.folder.check_settings(numbers["identity"], self.identity, self.changeable)
        if tensors["best"].keys() != self.network.state_dict().keys():
            raise ValueError("its best weights are those of another model")
        for name, module in self.modules.items():
            module.load_state_dict(tensors[name])
        for name, optimizer in self.optimizers.items():
            restore_optimizer(optimizer, tensors[name])
        restore_random_state(tensors["random"])
        self.best = {name: tensor.to(self.accelerator.device) for name, tensor in tensors["best"].items()}
        self.step, self.best_step, self.metrics = numbers["step"], numbers["best_step"], numbers["metrics"]
        return numbers["seconds"]


@contextmanager
def stop_signals(announce: bool) -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C or SIGTERM sets, so that a run can finish its step and write a checkpoint.

    A second signal has its usual effect and ends the process immediately.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread can handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        asked.set()
        restore()
        if announce:
            os.write(2, f"\n{STOPPING}\n".encode())  # Python's own streams are not safe in a signal handler

    for number in before:
        signal.signal(number, stop)
    try:
        yield asked
    finally:
        restore()


def schedule(share: float, warmup: float, kind: str = "linear") -> float:
    """Returns a factor that rises linearly to 1 during the warm-up, then falls linearly to 0 or stays constant."""
    if share < warmup:
        return share / warmup
    return (1 - share) / (1 - warmup) if kind == "linear" else 1.0


def within_error_of_best(score: float, earlier: Sequence[float], records: int, errors: float = 1.0) -> bool:
    """Returns True if a score is at most `errors` standard errors below the best earlier one.

    Scores are shares of `records` records.

    Among scores that a small held-out set cannot distinguish, the latest is the most trustworthy: it has seen the most
    data at the smallest learning rate, whereas the highest of many noisy scores is mostly due to chance.
    """
    best = max(earlier, default=0.0)
    share = (best * records + 2) / (records + 4)  # Agresti and Coull (1998): gives a perfect score an error, too
    return score >= best - errors * math.sqrt(share * (1 - share) / (records + 4))


def sync_progress(accelerator: Accelerator, share: float, stop: bool) -> tuple[float, bool]:
    """Returns the progress of the run and whether it was asked to stop, equal in all processes."""
    if accelerator.num_processes == 1:
        return share, stop
    own = torch.tensor([share, float(stop)], device=accelerator.device, dtype=torch.float64)
    total = summed(accelerator, own).tolist()
    return total[0] / accelerator.num_processes, total[1] > 0


def sum_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients over all processes; each has divided its own by the size of the whole batch."""
    if accelerator.num_processes == 1:
        return
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = summed(accelerator, gradient)


def summed(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Returns the sum of a tensor over all processes."""
    if accelerator.num_processes == 1:
        return value
    total = accelerator.reduce(value, "sum")
    assert isinstance(total, Tensor)
    return total


def copy_of(network: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of a network's state."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
