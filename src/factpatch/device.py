"""Where models run."""

from __future__ import annotations

import torch

from factpatch.errors import DeviceError


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
