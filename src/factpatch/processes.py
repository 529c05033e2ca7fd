"""Running in several processes that `accelerate launch` has started together."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")


def join_processes(device: torch.device) -> PartialState:
    """Joins the processes that `accelerate launch` has started together with this one, if any."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    atexit.register(_leave_processes)
    state = PartialState(cpu=device.type == "cpu")
    if state.device and state.device.type != device.type and not state.use_distributed:
        # Accelerate would keep the kind of device that an earlier run in this process has used.
        AcceleratorState._reset_state(reset_partial_state=True)
        state = PartialState(cpu=device.type == "cpu")
    return state


def accelerator_on(device: torch.device, **options: Any) -> Accelerator:
    """Creates an Accelerator for one run on this kind of device, in all processes that were started together."""
    from accelerate import Accelerator

    join_processes(device)
    return Accelerator(cpu=device.type == "cpu", **options)


def broadcast_from_first(value: T) -> T:
    """Returns the first process's value in all processes: rounding may make their own values differ."""
    from accelerate.utils import broadcast_object_list

    shared = [value]
    broadcast_object_list(shared)
    return shared[0]


def _leave_processes() -> None:
    """Leaves the process group before Python shuts down, because gloo's threads could abort the process later."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
