"""Where models run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from factpatch.errors import DeviceError, InputError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find_device(name: str | None = None) -> torch.device:
    """The device asked for, or the best there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}, which this machine cannot use")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{name} was asked for, but this machine has no usable CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{name} was asked for, but this machine has {torch.cuda.device_count()} CUDA GPUs")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # which is what Accelerate takes
    return device


def find_dtype(precision: str | None, device: str | None = None) -> torch.dtype:
    """The precision asked for, or the device's: bf16 on a GPU, fp32 elsewhere."""
    precision = precision or ("bf16" if find_device(device).type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise InputError(f"expected a precision out of {', '.join(PRECISIONS)}, found {precision!r}")
    return PRECISIONS[precision]


def surroundings(device: torch.device) -> dict[str, Any]:
    """What a result was found with, to be kept beside it."""
    import transformers

    from factpatch import __version__

    versions = {"factpatch": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"versions": versions, "device": name}


def to_device(device: torch.device, values: NDArray[Any] | Sequence[int]) -> Tensor:
    """As a tensor there, without waiting for the device; pinned, so that the values last until they are copied."""
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def use_free_cores(model: Any) -> None:
    """Sets the number of torch's threads to the number of cores that other processes leave free."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores - round(os.getloadavg()[0])))
