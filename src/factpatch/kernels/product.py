"""A linear layer under low-rank edits.

One program computes a tile of one edit's output. It computes the layer's own product and the factors' product together,
so that adding them needs no extra pass over memory.
"""

from __future__ import annotations

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Rows, outputs and inputs of a tile, number of warps, and stages of the load pipeline. The large tile is for ranks
# above 32, on GPUs with enough shared memory.
SMALL, LARGE = ((128, 128, 64), 4, 3), ((128, 256, 64), 8, 3)
LARGE_BYTES = 172_032


@triton.jit
def _edited_product(
    out, left, x, weight, bias, A, B, tokens, width, outputs, rank, weight_out, weight_in,
    BIASED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """Computes x Wᵀ + bias + (x Aᵀ) B and x Aᵀ. Indices wrap around at the edges, where nothing is written."""
    tiles, across = tl.cdiv(tokens, ROWS), tl.cdiv(outputs, OUT)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    edit = (row // tiles).to(tl.int64)
    token, out_ = (row % tiles) * ROWS + tl.arange(0, ROWS), column * OUT + tl.arange(0, OUT)
    in_, rank_ = tl.arange(0, IN), tl.arange(0, RANK)
    x_at = x + (edit * tokens + token % tokens)[:, None] * width + in_[None, :]
    weight_at = weight + (out_ % outputs)[None, :] * weight_out + in_[:, None] * weight_in
    A_at = A + edit * rank * width + (rank_ % rank)[None, :] * width + in_[:, None]
    sums = tl.zeros((ROWS, OUT), tl.float32)
    lefts = tl.zeros((ROWS, RANK), tl.float32)
    for _ in range(0, width, IN):
        x_ = tl.load(x_at)
        sums = tl.dot(x_, tl.load(weight_at), sums)
        lefts = tl.dot(x_, tl.load(A_at), lefts)
        x_at += IN
        weight_at += IN * weight_in
        A_at += IN
    left_ = lefts.to(x.dtype.element_ty)
    in_outputs = (out_ < outputs)[None, :]
    B_at = B + edit * rank * outputs + rank_[:, None] * outputs + out_[None, :]
    sums = tl.dot(left_, tl.load(B_at, mask=in_outputs & (rank_[:, None] < rank), other=0.0), sums)
    if BIASED:
        sums += tl.load(bias + out_ % outputs).to(tl.float32)[None, :]
    rows = (edit * tokens + token)[:, None]
    inside = (token < tokens)[:, None]
    tl.store(out + rows * outputs + out_[None, :], sums.to(x.dtype.element_ty), inside & in_outputs)
    if column == 0:
        tl.store(left + rows * rank + rank_[None, :], left_, inside & (rank_ < rank)[None, :])


def edited_product(x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x Wᵀ + bias + (x Aᵀ) B, shaped like x, and x Aᵀ (edits, rows, rank). The rows of x are edit-major.

    The width must be a multiple of the tile's inputs, and the rank at most 64.
    """
    x, A, B = x.contiguous(), A.contiguous(), B.contiguous()
    edits, rank, width = A.shape
    outputs, tokens = B.shape[2], x.numel() // (width * edits)
    out, left = x.new_empty(*x.shape[:-1], outputs), x.new_empty(edits, tokens, rank)
    RANK = max(16, triton.next_power_of_2(rank))
    (ROWS, OUT, IN), warps, stages = LARGE if RANK > 32 and _shared_memory(x.device) >= LARGE_BYTES else SMALL
    with torch.cuda.device_of(x):
        _edited_product[(edits * triton.cdiv(tokens, ROWS) * triton.cdiv(outputs, OUT),)](
            out, left, x, weight, bias if bias is not None else x, A, B, tokens, width, outputs, rank, *weight.stride(),
            BIASED=bias is not None, RANK=RANK, ROWS=ROWS, OUT=OUT, IN=IN, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, left


@cache
def _shared_memory(device: torch.device) -> int:
    """Returns the shared memory in bytes that one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
