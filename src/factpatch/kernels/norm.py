"""Layer norm with frozen weights. One program normalises one row."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _norm(out, x, weight, bias, means, scales, width, epsilon, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    x_ = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x_, 0) / width
    centred = tl.where(inside, x_ - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + epsilon)
    weight_ = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    bias_ = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (centred * scale * weight_ + bias_).to(out.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _norm_back(g_x, g, x, weight, means, scales, width, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < width
    mean, scale = tl.load(means + row), tl.load(scales + row)
    x_ = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    g_ = tl.load(g + row * width + column, mask=inside, other=0.0).to(tl.float32)
    g_ *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(inside, (x_ - mean) * scale, 0.0)
    gradient = (g_ - tl.sum(g_, 0) / width - normed * (tl.sum(g_ * normed, 0) / width)) * scale
    tl.store(g_x + row * width + column, gradient.to(g_x.dtype.element_ty), mask=inside)


class Norm(torch.autograd.Function):
    """Layer norm over the last dimension; only the input gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        means, scales = x.new_empty((2, x.numel() // width), dtype=torch.float32)
        WIDTH = triton.next_power_of_2(width)
        with torch.cuda.device_of(x):
            _norm[(len(means),)](out, x, weight, bias, means, scales, width, epsilon, WIDTH=WIDTH, num_warps=1)
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved_tensors
        g = gradients[0].contiguous()
        g_x = torch.empty_like(x)
        width = x.shape[-1]
        WIDTH = triton.next_power_of_2(width)
        with torch.cuda.device_of(x):
            _norm_back[(len(means),)](g_x, g, x, weight, means, scales, width, WIDTH=WIDTH, num_warps=1)
        return g_x, None, None, None
