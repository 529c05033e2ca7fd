"""Devices, precisions and CPU threads that models run with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from factpatch.errors import DeviceError, InputError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find_device(name: str | None = None) -> torch.device:
    """Returns the device with this name. Default: a GPU if one is available, otherwise the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}, which is not supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{name} was requested, but this machine has no usable CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DeviceError(f"{name} was requested, but this machine has {count} CUDA GPUs; count them from cuda:0")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # Accelerate uses the current device
    return device


def find_dtype(precision: str | None, device: str | None) -> torch.dtype:
    """Returns the dtype of the precision with this name. Default: bf16 on a GPU, fp32 on a CPU."""
    precision = precision or ("bf16" if find_device(device).type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise InputError(f"expected one of the precisions {', '.join(PRECISIONS)}, found {precision!r}")
    return PRECISIONS[precision]


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the software versions and the device, to be recorded with a result."""
    import transformers

    from factpatch import __version__

    versions = {"factpatch": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"versions": versions, "device": name}


def to_device(device: torch.device, values: NDArray[Any] | Sequence[int]) -> Tensor:
    """Copies values to a device without waiting for it. Pinned memory makes the copy asynchronous."""
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def use_free_cores(model: Any) -> None:
    """Sets torch's number of CPU threads for a TaskModel: one per idle core.

    A thread that shares a core with other work makes all other threads wait, which costs far more than it contributes.
    A number that the user has set with OMP_NUM_THREADS is kept.
    """
    if model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(idle_cores())


def idle_cores(seconds: float = 0.2) -> int:
    """Returns the number of cores that are idle now, out of those that this process may use; at least one."""
    if not Path("/proc/stat").exists():
        return max(1, (os.cpu_count() or 1) - round(os.getloadavg()[0]))
    before = _core_times()
    time.sleep(seconds)
    shares = [  # fraction of that time during which each core was idle
        (now[0] - then[0]) / max(1, now[1] - then[1]) for then, now in zip(before, _core_times(), strict=True)
    ]
    return max(1, round(sum(shares)))


def _core_times() -> list[tuple[int, int]]:
    """Returns the idle and the total time of each core that this process may use, since the machine was started."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    times = {line[0]: list(map(int, line[1:9])) for line in lines if line[0].startswith("cpu")}
    return [(sum(times[f"cpu{core}"][3:5]), sum(times[f"cpu{core}"])) for core in sorted(os.sched_getaffinity(0))]
