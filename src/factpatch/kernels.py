"""GPU kernels, in Triton, of what torch's own do at a fraction of the memory's speed where texts are short.

Importable where Triton is, which comes with torch for GPUs. Triton launches on the thread's current device, so each
launch makes its tensors' device that for as long.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Attention. One program holds all of one row and head: queries (Q, width), keys and values (K, width). Nothing between
# the inputs and the output is written to memory, and the way back computes it anew.

WARPS = (1, 2)  # there, and back, for each 1024 values of a tile
NEVER = tl.constexpr(-1e30)  # the score of what is masked; finite, so that a row without anything to see stays finite


@triton.jit
def _tile(start, stride_token, tokens, width: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens and widths of one row and head, zeros beyond its edges."""
    token, place = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    return start + token * stride_token + place, (token < tokens) & (place < width)


@triton.jit
def _read(start, stride_token, tokens, width: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    at, inside = _tile(start, stride_token, tokens, width, TOKENS, WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(values, start, stride_token, tokens, width: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    at, inside = _tile(start, stride_token, tokens, width, TOKENS, WIDTH)
    tl.store(at, values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _weights(q, k, mask, stride_query, stride_key, queries, keys, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """softmax(q kᵀ · scale) where it may be seen: (Q, K)."""
    scores = tl.dot(q, tl.trans(k)) * scale
    query, key = tl.arange(0, q.shape[0])[:, None], tl.arange(0, k.shape[0])[None, :]
    if MASKED:
        inside = (query < queries) & (key < keys)
        seen = tl.load(mask + query * stride_query + key * stride_key, mask=inside, other=0)
        scores = tl.where(seen != 0, scores, NEVER)
    if CAUSAL:
        scores = tl.where(key <= query, scores, NEVER)
    scores = tl.where(key < keys, scores, float("-inf"))
    raised = tl.exp(scores - tl.max(scores, 1)[:, None])
    return raised / tl.sum(raised, 1)[:, None]


@triton.jit(do_not_specialize=["queries", "keys"])
def _attend(
    out, q, k, v, mask, out_row, out_head, out_token, q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head,
    v_token, mask_row, mask_query, mask_key, heads, queries, keys, scale,
    width: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q_ = _read(q + row * q_row + head * q_head, q_token, queries, width, Q, WIDTH)
    k_ = _read(k + row * k_row + head * k_head, k_token, keys, width, K, WIDTH)
    v_ = _read(v + row * v_row + head * v_head, v_token, keys, width, K, WIDTH)
    weights = _weights(q_, k_, mask + row * mask_row, mask_query, mask_key, queries, keys, scale, MASKED, CAUSAL)
    said = tl.dot(weights.to(v_.dtype), v_)
    _write(said, out + row * out_row + head * out_head, out_token, queries, width, Q, WIDTH)


@triton.jit(do_not_specialize=["queries", "keys"])
def _attend_back(
    g_q, g_k, g_v, g, q, k, v, mask, g_row, g_head, g_token, q_row, q_head, q_token, k_row, k_head, k_token, v_row,
    v_head, v_token, mask_row, mask_query, mask_key, heads, queries, keys, scale,
    width: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients are laid out as (rows, tokens, heads, width)."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q_ = _read(q + row * q_row + head * q_head, q_token, queries, width, Q, WIDTH)
    k_ = _read(k + row * k_row + head * k_head, k_token, keys, width, K, WIDTH)
    v_ = _read(v + row * v_row + head * v_head, v_token, keys, width, K, WIDTH)
    g_ = _read(g + row * g_row + head * g_head, g_token, queries, width, Q, WIDTH)
    weights = _weights(q_, k_, mask + row * mask_row, mask_query, mask_key, queries, keys, scale, MASKED, CAUSAL)
    g_weights = tl.dot(g_, tl.trans(v_))
    g_scores = weights * (g_weights - tl.sum(weights * g_weights, 1)[:, None]) * scale
    g_scores, weights = g_scores.to(q_.dtype), weights.to(q_.dtype)
    first = heads * width
    of_queries, of_keys = row * queries * first + head * width, row * keys * first + head * width
    _write(tl.dot(g_scores, k_), g_q + of_queries, first, queries, width, Q, WIDTH)
    _write(tl.dot(tl.trans(g_scores), q_), g_k + of_keys, first, keys, width, K, WIDTH)
    _write(tl.dot(tl.trans(weights), g_), g_v + of_keys, first, keys, width, K, WIDTH)


class ShortAttention(torch.autograd.Function):
    """(rows, heads, tokens, width) each, and a mask (rows, 1, queries, keys) of what may be seen, or none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)  # as what follows reads it
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.causal = scale, causal
        _launch(_attend, (out,), (out, q, k, v), mask, scale, causal, WARPS[0])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        g = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        found = tuple(x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v))
        _launch(_attend_back, (*found, g), (g, q, k, v), mask, ctx.scale, ctx.causal, WARPS[1])
        return (*(x.transpose(1, 2) for x in found), None, None, None)


def _launch(
    kernel: Any,
    first: tuple[Tensor, ...],
    like: tuple[Tensor, ...],
    mask: Tensor | None,
    scale: float,
    causal: bool,
    warps: int,
) -> None:
    """`like`: what has strides of its own, of which the last three are q, k and v; `warps` for each 1024 values."""
    rows, heads, queries, width = like[1].shape
    keys = like[2].shape[2]
    Q, K, WIDTH = (max(16, triton.next_power_of_2(size)) for size in (queries, keys, width))
    strides = [stride for tensor in like for stride in tensor.stride()[:3]]
    seen = (0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))
    with torch.cuda.device_of(like[1]):
        kernel[(rows * heads,)](
            *first, *like[1:], like[1] if mask is None else mask.view(torch.uint8), *strides, *seen, heads, queries,
            keys, scale, width=width, Q=Q, K=K, WIDTH=WIDTH, MASKED=mask is not None, CAUSAL=causal,
            num_warps=min(8, warps * max(1, max(Q, K) * WIDTH // 1024)),
        )  # fmt: skip


# Layer norm


@triton.jit
def _norm(out, x, weight, bias, means, scales, width, epsilon, WIDTH: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = place < width
    x_ = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x_, 0) / width
    apart = tl.where(inside, x_ - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, 0) / width + epsilon)
    weight_ = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    bias_ = tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, (apart * scale * weight_ + bias_).to(out.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _norm_back(g_x, g, x, weight, means, scales, width, WIDTH: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = place < width
    mean, scale = tl.load(means + row), tl.load(scales + row)
    x_ = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    g_ = tl.load(g + row * width + place, mask=inside, other=0.0).to(tl.float32)
    g_ *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(inside, (x_ - mean) * scale, 0.0)
    found = (g_ - tl.sum(g_, 0) / width - normed * (tl.sum(g_ * normed, 0) / width)) * scale
    tl.store(g_x + row * width + place, found.to(g_x.dtype.element_ty), mask=inside)


class Norm(torch.autograd.Function):
    """Layer norm over the last dimension, with weights that are not trained."""

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


# A layer under edits. One program makes a tile of the output of one edit: the layer's own product and the factors' at
# once, so that the sum takes no pass over memory.

# Rows, outputs and inputs of a tile; warps, and stages of loading. The large one is for ranks above 32 on GPUs with
# the shared memory that it takes.
SMALL, LARGE = ((128, 128, 64), 4, 3), ((128, 256, 64), 8, 3)
LARGE_BYTES = 172_032


@triton.jit
def _edited_product(
    out, left, x, weight, bias, A, B, tokens, width, outputs, rank, weight_out, weight_in,
    BIASED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """x Wᵀ + bias + (x Aᵀ) B, and x Aᵀ. What lies beyond an edge is read from elsewhere, and not written."""
    tiles, across = tl.cdiv(tokens, ROWS), tl.cdiv(outputs, OUT)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    edit = (row // tiles).to(tl.int64)
    token, place = (row % tiles) * ROWS + tl.arange(0, ROWS), column * OUT + tl.arange(0, OUT)
    in_, rank_ = tl.arange(0, IN), tl.arange(0, RANK)
    x_at = x + (edit * tokens + token % tokens)[:, None] * width + in_[None, :]
    weight_at = weight + (place % outputs)[None, :] * weight_out + in_[:, None] * weight_in
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
    ours = (place < outputs)[None, :]
    B_at = B + edit * rank * outputs + rank_[:, None] * outputs + place[None, :]
    sums = tl.dot(left_, tl.load(B_at, mask=ours & (rank_[:, None] < rank), other=0.0), sums)
    if BIASED:
        sums += tl.load(bias + place % outputs).to(tl.float32)[None, :]
    rows = (edit * tokens + token)[:, None]
    inside = (token < tokens)[:, None]
    tl.store(out + rows * outputs + place[None, :], sums.to(x.dtype.element_ty), inside & ours)
    if column == 0:
        tl.store(left + rows * rank + rank_[None, :], left_, inside & (rank_ < rank)[None, :])


def edited_product(x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """x Wᵀ + bias + (x Aᵀ) B, shaped as x is, and x Aᵀ (edits, rows, rank). x (..., width) has edits' rows in order.

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
    """Bytes that one program may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


# Factors of an update. One program makes all rows of one edit's factor, and a block of its width.


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
