"""Several processes that work together, started by `accelerate launch`."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")


def join_processes(device: torch.device) -> PartialState:
    """The processes that `accelerate launch` started together, of which this is one; or this one alone."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    atexit.register(_leave_processes)
    state = PartialState(cpu=device.type == "cpu")
    if state.device and state.device.type != device.type and not state.use_distributed:
        # An earlier run of this process was on another kind of device, which Accelerate would stay with.
        AcceleratorState._reset_state(reset_partial_state=True)
        state = PartialState(cpu=device.type == "cpu")
    return state


def accelerator_on(device: torch.device, **options: Any) -> Accelerator:
    """Accelerate for one run there, in all processes that were started together."""
    from accelerate import Accelerator

    join_processes(device)
    return Accelerator(cpu=device.type == "cpu", **options)


def from_first(value: T) -> T:
    """What the first process found, in all of them: near ties may fall differently in others."""
    from accelerate.utils import broadcast_object_list

    shared = [value]
    broadcast_object_list(shared)
    return shared[0]


def _leave_processes() -> None:
    """Before Python is taken down: one of gloo's threads that finds it gone would abort the process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
