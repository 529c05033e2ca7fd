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
def training_attention(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Chooses attention kernels for training on short texts.

    On a CPU, torch's fused kernel needs several times as long for the gradients in bf16 as separate products do.
    """
    if device.type == "cpu" and dtype == torch.bfloat16:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    else:
        with no_cudnn_attention():
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
