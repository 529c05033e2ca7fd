"""Where models run."""

from __future__ import annotations

import torch

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
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{name} was asked for, but this machine has no usable CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{name} was asked for, but this machine has {torch.cuda.device_count()} CUDA GPUs")
    return device


def find_dtype(precision: str | None, device: str | None = None) -> torch.dtype:
    """The precision asked for, or the device's: bf16 on a GPU, fp32 elsewhere."""
    precision = precision or ("bf16" if find_device(device).type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise InputError(f"expected a precision out of {', '.join(PRECISIONS)}, found {precision!r}")
    return PRECISIONS[precision]
