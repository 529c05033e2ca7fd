"""Attention for short texts: self-attention and cross-attention.

One program computes one row and head: queries (Q, width), keys and values (K, width). Intermediate results are never
written to memory; the backward pass computes the attention weights again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] (comes with torch for GPUs)
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

WARPS = (1, 2)  # warps per 1024 values of a tile, in the forward and in the backward pass
NEVER = tl.constexpr(-1e30)  # score of masked keys; finite, so that queries whose keys are all masked give no NaN


@triton.jit
def _tile(start, stride_token, tokens, width: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the addresses of a tile of one row and head, and a mask of those that lie inside the row."""
    token, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    return start + token * stride_token + column, (token < tokens) & (column < width)


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
    """Computes the attention weights softmax(q kᵀ · scale), with masked keys left out: (Q, K)."""
    scores = tl.dot(q, tl.trans(k)) * scale
    query, key = tl.arange(0, q.shape[0])[:, None], tl.arange(0, k.shape[0])[None, :]
    if MASKED:
        inside = (query < queries) & (key < keys)
        visible = tl.load(mask + query * stride_query + key * stride_key, mask=inside, other=0)
        scores = tl.where(visible != 0, scores, NEVER)
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
    attended = tl.dot(weights.to(v_.dtype), v_)
    _write(attended, out + row * out_row + head * out_head, out_token, queries, width, Q, WIDTH)


@triton.jit(do_not_specialize=["queries", "keys"])
def _attend_back(
    g_q, g_k, g_v, g, q, k, v, mask, g_row, g_head, g_token, q_row, q_head, q_token, k_row, k_head, k_token, v_row,
    v_head, v_token, mask_row, mask_query, mask_key, heads, queries, keys, scale,
    width: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of q, k and v, laid out as (rows, tokens, heads, width)."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q_ = _read(q + row * q_row + head * q_head, q_token, queries, width, Q, WIDTH)
    k_ = _read(k + row * k_row + head * k_head, k_token, keys, width, K, WIDTH)
    v_ = _read(v + row * v_row + head * v_head, v_token, keys, width, K, WIDTH)
    g_ = _read(g + row * g_row + head * g_head, g_token, queries, width, Q, WIDTH)
    weights = _weights(q_, k_, mask + row * mask_row, mask_query, mask_key, queries, keys, scale, MASKED, CAUSAL)
    g_weights = tl.dot(g_, tl.trans(v_))
    g_scores = weights * (g_weights - tl.sum(weights * g_weights, 1)[:, None]) * scale
    g_scores, weights = g_scores.to(q_.dtype), weights.to(q_.dtype)
    stride = heads * width  # of a token
    of_queries, of_keys = row * queries * stride + head * width, row * keys * stride + head * width
    _write(tl.dot(g_scores, k_), g_q + of_queries, stride, queries, width, Q, WIDTH)
    _write(tl.dot(tl.trans(g_scores), q_), g_k + of_keys, stride, keys, width, K, WIDTH)
    _write(tl.dot(tl.trans(weights), g_), g_v + of_keys, stride, keys, width, K, WIDTH)


class ShortAttention(torch.autograd.Function):
    """Attention over q, k and v (rows, heads, tokens, width) with an optional mask (rows, 1, queries, keys)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        # Allocated in the memory layout that the next layer reads.
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.causal = scale, causal
        _launch(_attend, (out,), (out, q, k, v), mask, scale, causal, WARPS[0])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        g = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        results = tuple(x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v))
        _launch(_attend_back, (*results, g), (g, q, k, v), mask, ctx.scale, ctx.causal, WARPS[1])
        return (*(x.transpose(1, 2) for x in results), None, None, None)


def _launch(
    kernel: Any,
    first: tuple[Tensor, ...],
    like: tuple[Tensor, ...],
    mask: Tensor | None,
    scale: float,
    causal: bool,
    warps: int,
) -> None:
    """Launches a kernel on the tensors `first`, followed by q, k and v.

    `like` holds the tensors whose strides the kernel needs; the last three are q, k and v.
    """
    rows, heads, queries, width = like[1].shape
    keys = like[2].shape[2]
    Q, K, WIDTH = (max(16, triton.next_power_of_2(size)) for size in (queries, keys, width))
    strides = [stride for tensor in like for stride in tensor.stride()[:3]]
    mask_strides = (0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))
    with torch.cuda.device_of(like[1]):
        kernel[(rows * heads,)](
            *first, *like[1:], like[1] if mask is None else mask.view(torch.uint8), *strides, *mask_strides, heads,
            queries, keys, scale, width=width, Q=Q, K=K, WIDTH=WIDTH, MASKED=mask is not None, CAUSAL=causal,
            num_warps=min(8, warps * max(1, max(Q, K) * WIDTH // 1024)),
        )  # fmt: skip
