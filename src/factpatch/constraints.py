"""Constraints C ≤ m on the edited model, as pure functions (De Cao et al., 2021, §3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from factpatch.deltas import Delta
from factpatch.kernels import kernels_support

WIDE = 1024  # number of classes from which one fused kernel is faster than torch's several passes


def kl(before: Tensor, after: Tensor) -> Tensor:
    """Computes KL( p(·; θ) ‖ p(·; θ') ) from two sets of logits, (positions, classes): (positions,)."""
    same_form = before.dtype == after.dtype and before.shape == after.shape and not before.requires_grad
    in_rows = after.dim() == 2 and before.stride(-1) == after.stride(-1) == 1
    if after.shape[-1] >= WIDE and same_form and in_rows and kernels_support(after):
        from factpatch.kernels.divergence import Divergence

        return Divergence.apply(before, after)
    dtype = torch.promote_types(after.dtype, torch.float32)
    log_p, log_q = before.log_softmax(-1, dtype), after.log_softmax(-1, dtype)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def lp(deltas: Mapping[str, Delta], p: float = 2.0) -> Tensor:
    """Averages (mean |ΔW|^p)^(1/p) over the weights: (edits,) for stacks, otherwise a scalar.

    For p = 2 it is computed from the factors. Any other p needs the dense change, one weight at a time.
    """
    return torch.stack([_root_mean(delta, p) for delta in deltas.values()]).mean(0)


def _root_mean(delta: Delta, p: float) -> Tensor:
    if p == 2:
        return delta.norm(torch.float32) / math.prod(delta.shape) ** 0.5
    return delta.dense().abs().pow(p).mean((-2, -1)).pow(1 / p)
