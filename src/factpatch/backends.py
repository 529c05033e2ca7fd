"""Context managers that choose which kernels torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def no_cudnn_attention() -> Iterator[None]:
    """Disables cuDNN's attention kernels.

    On recent GPUs torch prefers cuDNN, which needs about ten milliseconds of planning for each new shape, and
    is slower for short texts even after that.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """Lets torch compute float32 products on a GPU's tensor cores (TF32), with ten bits of mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
