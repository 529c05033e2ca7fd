"""Layer norm and RMS norm with frozen weights. One program normalises one row.

An RMS norm is a layer norm without centring and without a bias: x / √(mean(x²) + ε) · weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _norm(out, x, weight, bias, means, scales, width, epsilon, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    centred = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(centred, 0) / width
        centred = tl.where(inside, centred - mean, 0.0)
        tl.store(means + row, mean)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + epsilon)
    normed = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _norm_back(g_x, g, x, weight, means, scales, width, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    scale = tl.load(scales + row)
    normed = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    g_ = tl.load(g + row * width + column, mask=inside, other=0.0).to(tl.float32)
    g_ *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        normed = tl.where(inside, normed - tl.load(means + row), 0.0)
    normed *= scale
    gradient = g_ - normed * (tl.sum(g_ * normed, 0) / width)
    if CENTRED:
        gradient -= tl.sum(g_, 0) / width
    tl.store(g_x + row * width + column, (gradient * scale).to(g_x.dtype.element_ty), mask=inside)


class Norm(torch.autograd.Function):
    """Layer norm over the last dimension or, without a bias, RMS norm. Only the input gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        means, scales = x.new_empty((2, x.numel() // width), dtype=torch.float32)
        sizes = {"WIDTH": triton.next_power_of_2(width), "CENTRED": bias is not None}
        with torch.cuda.device_of(x):
            _norm[(len(means),)](out, x, weight, bias, means, scales, width, epsilon, **sizes, num_warps=1)
        ctx.save_for_backward(x, weight, means, scales)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved_tensors
        g = gradients[0].contiguous()
        g_x = torch.empty_like(x)
        with torch.cuda.device_of(x):
            _norm_back[(len(means),)](g_x, g, x, weight, means, scales, x.shape[-1], **ctx.sizes, num_warps=1)
        return g_x, None, None, None
