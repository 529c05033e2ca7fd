"""Captures the factors of the edits' gradients, and runs many edits in one forward pass.

For a linear layer with inputs X (tokens × in) and gradients of the edit loss at its outputs D (tokens × out), the
gradient of its weight is Dᵀ X. Neither this gradient nor a change ΔW = Bᵀ A made from it needs a matrix of
size out × in: the layer under the change computes `y = W x + (x Aᵀ) B`. Both functions here work on the layers, for
all edits of a batch at once, and leave the model unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.deltas import Delta, Dense, LowRank
from factpatch.errors import ModelError
from factpatch.kernels import kernels_support


@dataclass(frozen=True)
class Trace:
    """A layer's inputs and output gradients for each edit."""

    X: Tensor  # (edits, tokens, in)   inputs
    D: Tensor  # (edits, tokens, out)  gradients of the edit loss at the outputs


def capture(layers: Mapping[str, nn.Module], losses: Callable[[], Tensor]) -> dict[str, Trace]:
    """Runs `losses`, which returns one loss per edit, and returns each layer's inputs and output gradients.

    This takes one forward and one backward pass. The losses are summed, so that an edit's D does not depend on the
    rest of the batch. No gradient of a parameter is computed: the backward pass goes through activations only. The
    tokens of a layer that runs several times are concatenated; a layer that does not run is omitted.
    """
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}

    def watch(name: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:
                output = output.detach().requires_grad_()
            inputs[name].append(args[0].detach())
            outputs[name].append(output)
            return output.clone()  # later code may modify it in place, but D belongs to the layer's own output

        return hook

    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(watch(name)).remove)
        per_edit = losses()
        flat = [output for name in layers for output in outputs[name]]
        gradients = iter(torch.autograd.grad(per_edit.sum(), flat, allow_unused=True))

    edits = len(per_edit)
    traces: dict[str, Trace] = {}
    for name in layers:
        pairs = [(x, y, next(gradients)) for x, y in zip(inputs[name], outputs[name], strict=True)]
        if not pairs:
            continue
        for x, _, _ in pairs:
            check_rows_first(name, x, x.dim() <= 2 or x.shape[0] == edits)
        X = [x.reshape(edits, -1, x.shape[-1]) for x, _, _ in pairs]
        D = [(torch.zeros_like(y) if g is None else g).reshape(edits, -1, y.shape[-1]) for _, y, g in pairs]
        traces[name] = Trace(_joined(X), _joined(D))
    return traces


@contextmanager
def edited(layers: Mapping[str, nn.Module], deltas: Mapping[str, Delta]) -> Iterator[None]:
    """Runs every forward pass of a `with` block under the given changes, each a stack with one entry per edit.

    Rows are edit-major: with E edits, the first 1/E of the rows run under the first edit, and so on. Beam search keeps
    that order when it repeats rows for its beams, and cached keys and values belong to their rows, so both work.
    """

    def run_under(name: str, delta: Delta, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        edits = next(iter(delta.tensors.values())).shape[0]
        plain, is_plain = layer.forward, "forward" not in vars(layer)
        wide = layer.weight.dtype in (torch.float32, torch.float64)  # half precision would round small changes away
        if isinstance(delta, Dense) and edits == 1 and is_plain and wide and type(layer) is nn.Linear:
            return _run_folded(layer, delta)

        def forward(x: Tensor) -> Tensor:
            check_rows_first(name, x, x.shape[0] % edits == 0)
            if isinstance(delta, LowRank) and is_plain:
                A, B = delta.A.to(x.dtype), delta.B.to(x.dtype)
                if not torch.is_grad_enabled():
                    return _edited_product(layer, x, A, B)[0]
                if not layer.weight.requires_grad:
                    return _EditedLinear.apply(x, A, B, layer)
            output = plain(x)
            y = output.reshape(edits, -1, output.shape[-1])  # (edits, rows·tokens, out)
            return delta.add_rows(y, x.reshape(edits, -1, x.shape[-1])).reshape(output.shape)

        return forward

    with ExitStack() as stack:
        for name, delta in deltas.items():
            layer = layers[name]
            before = vars(layer).get("forward")
            layer.forward = run_under(name, delta, layer)
            stack.callback(_restore, layer, before)
        yield


def _run_folded(layer: nn.Linear, delta: Dense) -> Callable[[Tensor], Tensor]:
    """Returns a forward that makes one product with W + ΔW, instead of one with W and one with ΔW."""

    def changed() -> Tensor:
        return layer.weight + delta.delta[0].to(layer.weight)

    without_gradients = cache(changed)  # shared by all passes that need no gradients

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, changed() if torch.is_grad_enabled() else without_gradients(), layer.bias)

    return forward


def _restore(layer: nn.Module, forward: Callable[..., Tensor] | None) -> None:
    del layer.forward
    if forward is not None:
        layer.forward = forward


class _EditedLinear(torch.autograd.Function):
    """y = W x + (x Aᵀ) B for a frozen layer.

    Plain autograd would need extra copies. Here (x Aᵀ) B is added to W x in place, and in the backward pass the
    factors' part of x's gradient is added to the layer's own. On a GPU one kernel does both, to save memory traffic.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, B: Tensor, layer: nn.Module) -> Tensor:
        output, left = _edited_product(layer, x, A, B)
        ctx.save_for_backward(x, A, B, left)
        ctx.layer = layer
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, A, B, left = ctx.saved_tensors
        g = gradients[0]
        per_edit = _per_edit(g, A)
        g_x: Tensor | None = None
        if ctx.needs_input_grad[0] and _has_kernel(ctx.layer, g, B):
            from factpatch.kernels.product import edited_product

            g_x, g_left = edited_product(g, ctx.layer.weight.T, None, B, A)
        else:
            g_left = per_edit @ B.mT
            if ctx.needs_input_grad[0]:
                weight = ctx.layer.weight if isinstance(ctx.layer, nn.Linear) else ctx.layer.weight.T  # Conv1D
                g_x = torch.matmul(g, weight)
                g_x.view(len(A), -1, A.shape[-1]).baddbmm_(g_left, A)
        g_A = g_left.mT @ _per_edit(x, A) if ctx.needs_input_grad[1] else None
        g_B = left.mT @ per_edit if ctx.needs_input_grad[2] else None
        return g_x, g_A, g_B, None


def _edited_product(layer: nn.Module, x: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns W x + (x Aᵀ) B and x Aᵀ (edits, rows·tokens, rank)."""
    if _has_kernel(layer, x, A):
        from factpatch.kernels.product import edited_product

        return edited_product(x, layer.weight, layer.bias, A, B)
    left = _per_edit(x, A) @ A.mT
    output = type(layer).forward(layer, x)
    output.view(len(A), -1, output.shape[-1]).baddbmm_(left, B)
    return output, left


def _has_kernel(layer: nn.Module, x: Tensor, factor: Tensor) -> bool:
    """Returns True if the kernel applies: a plain half-precision layer, a low rank, and enough rows to fill tiles."""
    return (
        type(layer) is nn.Linear
        and x.dtype == layer.weight.dtype
        and x.shape[-1] % 64 == 0
        and factor.shape[-2] <= 64
        and x.numel() // x.shape[-1] >= 64 * len(factor)
        and kernels_support(x)
    )


def _per_edit(x: Tensor, stack: Tensor) -> Tensor:
    """Reshapes x to (edits, rows·tokens, width)."""
    return x.reshape(len(stack), -1, x.shape[-1])


def check_rows_first(name: str, x: Tensor, holds: bool) -> None:
    """Raises a ModelError if the first dimension of a layer's inputs is not the rows: edits are told apart by rows."""
    if not holds:
        raise ModelError(
            f"{name} gets inputs of shape {tuple(x.shape)}, whose first dimension is not the texts of the batch; "
            "models of this architecture cannot be edited in batches"
        )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
