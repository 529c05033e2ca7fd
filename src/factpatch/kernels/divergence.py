"""KL divergence between two distributions over a vocabulary, computed from their logits.

In the forward pass, one program reads the logits of one position twice. In the backward pass, several programs share a
position and read its logits once. Of the results, only the gradient is as wide as the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 4096  # entries of the vocabulary that one program processes at a time
NEVER = tl.constexpr(-1e30)  # logit of impossible tokens; finite, as infinities cannot be subtracted


@triton.jit
def _read(logits, column, width):
    values = tl.load(logits + column, mask=column < width, other=NEVER).to(tl.float32)
    return tl.maximum(values, NEVER, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log_sum(logits, width, BLOCK: tl.constexpr):
    """Computes log Σ exp of a row, in one pass that keeps a running maximum."""
    column = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), NEVER, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        x = _read(logits, start + column, width)
        more = tl.maximum(most, x)
        sums = sums * tl.exp(most - more) + tl.exp(x - more)
        most = more
    top = tl.max(most, 0)
    return top + tl.log(tl.sum(sums * tl.exp(most - top), 0))


@triton.jit
def _divergence(out, sums_p, sums_q, p, q, p_row, q_row, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    p += row * p_row
    q += row * q_row
    sum_p, sum_q = _log_sum(p, width, BLOCK), _log_sum(q, width, BLOCK)
    terms = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        log_p, log_q = _read(p, start + column, width) - sum_p, _read(q, start + column, width) - sum_q
        p_, q_ = tl.exp(log_p), tl.exp(log_q)
        terms += p_ * (log_p - log_q) - p_ + q_  # the sum of − p + q is zero; these terms cancel rounding errors
    tl.store(out + row, tl.sum(terms, 0))
    tl.store(sums_p + row, sum_p)
    tl.store(sums_q + row, sum_q)


@triton.jit
def _divergence_back(g_q, g, sums_p, sums_q, p, q, g_row, p_row, q_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_ = tl.exp(_read(p + row * p_row, column, width) - tl.load(sums_p + row))
    q_ = tl.exp(_read(q + row * q_row, column, width) - tl.load(sums_q + row))
    gradient = tl.load(g + row) * (q_ - p_)
    tl.store(g_q + row * g_row + column, gradient.to(g_q.dtype.element_ty), mask=column < width)


class Divergence(torch.autograd.Function):
    """KL(p ‖ q) at each position in float32, from logits (positions, vocabulary). Only q gets a gradient."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor) -> Tensor:
        out, *sums = q.new_empty((3, len(q)), dtype=torch.float32)
        ctx.save_for_backward(p, q, *sums)
        with torch.cuda.device_of(q):
            _divergence[(len(q),)](
                out, *sums, p, q, p.stride(0), q.stride(0), q.shape[1], BLOCK=BLOCK, num_warps=8
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        p, q, *sums = ctx.saved_tensors
        g, g_q = gradients[0].contiguous(), torch.empty_like(q)
        with torch.cuda.device_of(q):
            _divergence_back[(len(q), triton.cdiv(q.shape[1], BLOCK))](
                g_q, g, *sums, p, q, g_q.stride(0), p.stride(0), q.stride(0), q.shape[1], BLOCK=BLOCK, num_warps=8
            )  # fmt: skip
        return None, g_q
