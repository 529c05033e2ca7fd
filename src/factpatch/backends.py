"""Settings of torch's own kernels, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def no_cudnn_attention() -> Iterator[None]:
    """Attention by torch's own kernels.

    cuDNN's, torch's first choice on recent GPUs, plans anew for every shape it meets, some ten milliseconds each; and
    for short texts it is slower even when it has planned.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """float32 products by a GPU's tensor cores, with the exponents of float32 and ten bits of its fractions."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
