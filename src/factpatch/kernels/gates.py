"""Factors of an update. One program makes all rows of one edit's factor, and a block of its width."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _gate(
    out, X, gate, last, gate_edit, last_edit, tokens, rank, width, RANK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    edit = tl.program_id(0).to(tl.int64)
    token, place = tl.arange(0, RANK)[:, None], (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = place < width
    at = token * width + place
    x = tl.load(X + edit * tokens * width + at, mask=inside & (token < tokens), other=0.0)
    gate_ = tl.load(gate + edit * gate_edit + place, mask=inside)
    last_ = tl.load(last + edit * last_edit + place, mask=inside)
    rows = tl.where(token == rank - 1, last_, x * gate_)
    tl.store(out + edit * rank * width + at, rows.to(x.dtype), mask=inside & (token < rank))


@triton.jit
def _gate_back(g_gate, g_last, g, X, tokens, rank, width, RANK: tl.constexpr, WIDTH: tl.constexpr):
    edit = tl.program_id(0).to(tl.int64)
    token, place = tl.arange(0, RANK)[:, None], (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = place < width
    at = token * width + place
    x = tl.load(X + edit * tokens * width + at, mask=inside & (token < tokens), other=0.0).to(tl.float32)
    g_ = tl.load(g + edit * rank * width + at, mask=inside & (token < rank), other=0.0).to(tl.float32)
    column = edit * width + place
    tl.store(g_gate + column, tl.sum(x * g_, 0)[None, :], mask=inside)
    tl.store(g_last + column, tl.sum(tl.where(token == rank - 1, g_, 0.0), 0)[None, :], mask=inside)


class GatedTokens(torch.autograd.Function):
    """[X ⊙ gate ; zeros ; last] of one weight: X (edits, tokens, width), gate and last (edits, width) in float32.

    Gates may be slices of wider rows.
    """

    @staticmethod
    def forward(ctx: Any, X: Tensor, gate: Tensor, last: Tensor, rank: int) -> Tensor:
        X = X.contiguous()
        out = X.new_empty(X.shape[0], rank, X.shape[2])
        ctx.save_for_backward(X)
        _launch_gate(_gate, (out, X, gate, last, gate.stride(0), last.stride(0)), X, rank)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (X,), g = ctx.saved_tensors, gradients[0].contiguous()
        g_gate, g_last = X.new_empty((2, X.shape[0], X.shape[2]), dtype=torch.float32)
        _launch_gate(_gate_back, (g_gate, g_last, g, X), X, g.shape[1])
        return None, g_gate, g_last, None


def _launch_gate(kernel: Any, first: tuple[Tensor | int, ...], X: Tensor, rank: int) -> None:
    edits, tokens, width = X.shape
    RANK = triton.next_power_of_2(rank)
    WIDTH = max(16, 4096 // RANK)
    with torch.cuda.device_of(X):
        kernel[(edits, triton.cdiv(width, WIDTH))](*first, tokens, rank, width, RANK=RANK, WIDTH=WIDTH, num_warps=4)
