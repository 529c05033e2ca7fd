"""Changes to one weight: low-rank factors ΔW = Bᵀ A, or a dense matrix.

Both classes hold either a single change or a stack of changes, with one entry per edit in a leading dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class LowRank:
    """ΔW = Bᵀ A. Nothing of size out × in is computed unless `dense()` is called."""

    A: Tensor  # (..., rank, in)
    B: Tensor  # (..., rank, out)

    @property
    def shape(self) -> tuple[int, int]:
        return self.B.shape[-1], self.A.shape[-1]

    @property
    def rank(self) -> int:
        return self.A.shape[-2]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"A": self.A, "B": self.B}

    def dense(self) -> Tensor:
        return self.B.float().mT @ self.A.float()  # (..., out, in)

    def norm(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Frobenius norm, computed from ⟨B₁ᵀA₁, B₂ᵀA₂⟩ = Σ (A₁A₂ᵀ ⊙ B₁B₂ᵀ)."""
        A, B = self.A.to(dtype), self.B.to(dtype)
        return ((A @ A.mT) * (B @ B.mT)).sum((-2, -1)).clamp(min=0).sqrt()

    def add_rows(self, output: Tensor, x: Tensor) -> Tensor:
        """Returns output + (x Aᵀ) B for a stack: x (edits, rows, in), output (edits, rows, out)."""
        return _add_product(output, x @ self.A.to(x.dtype).mT, self.B.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Dense:
    """A full ΔW, as fine-tuning produces it."""

    delta: Tensor  # (..., out, in)

    @property
    def shape(self) -> tuple[int, int]:
        return self.delta.shape[-2], self.delta.shape[-1]

    @property
    def rank(self) -> int:
        """The largest possible rank; the actual one is not computed."""
        return min(self.shape)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"delta": self.delta}

    def dense(self) -> Tensor:
        return self.delta.float()

    def norm(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.linalg.matrix_norm(self.delta.to(dtype))

    def add_rows(self, output: Tensor, x: Tensor) -> Tensor:
        return _add_product(output, x, self.delta.to(x.dtype).mT)


Delta = LowRank | Dense


def from_tensors(tensors: dict[str, Tensor]) -> Delta:
    """Builds a change from its `tensors`. Raises a ValueError if these are not a change of one weight."""
    if tensors.keys() == {"delta"} and tensors["delta"].dim() == 2 and tensors["delta"].numel():
        return Dense(tensors["delta"])
    if tensors.keys() == {"A", "B"}:
        A, B = tensors["A"], tensors["B"]
        if A.dim() == B.dim() == 2 and len(A) == len(B) and A.shape[1] and B.shape[1]:
            return LowRank(A, B)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    raise ValueError(f"expected factors A and B or a dense delta, found {shapes}")


def add(first: Delta, second: Delta) -> Delta:
    """Adds two changes. Factors are concatenated as long as they are smaller than a dense matrix."""
    out, in_ = first.shape
    factors_are_smaller = (first.rank + second.rank) * (out + in_) < out * in_
    if factors_are_smaller and isinstance(first, LowRank) and isinstance(second, LowRank):
        return LowRank(torch.cat([first.A, second.A], -2), torch.cat([first.B, second.B], -2))
    return Dense(first.dense() + second.dense())


def scaled(change: Delta, factor: float) -> Delta:
    """Multiplies a change by a number."""
    return LowRank(change.A, change.B * factor) if isinstance(change, LowRank) else Dense(change.delta * factor)


def stack(changes: list[Delta | None], shape: tuple[int, int], like: Tensor) -> Delta:
    """Stacks one change per edit, padding ranks with zeros. None stands for an edit that does not change the weight."""
    if any(isinstance(change, Dense) for change in changes):
        zero = like.new_zeros(shape)
        return Dense(torch.stack([zero if c is None else c.dense().to(like) for c in changes]))
    rank = aligned(max(c.rank for c in changes if c is not None), like)

    def padded(name: str, width: int) -> Tensor:
        factors = [like.new_zeros(0, width) if c is None else c.tensors[name].to(like) for c in changes]
        return torch.stack([F.pad(factor, (0, 0, 0, rank - len(factor))) for factor in factors])

    return LowRank(padded("A", shape[1]), padded("B", shape[0]))


def unstack(stacks: Mapping[str, LowRank]) -> list[dict[str, LowRank]]:
    """Splits stacks into one set of changes per edit. Drops rows that are zero in B, which includes all padding."""
    # One transfer for all weights: thousands of small ones would each wait for the GPU.
    used = torch.cat([stack.B.ne(0).any(-1) for stack in stacks.values()], dim=1).cpu()  # (edits, ranks)
    per_edit: list[dict[str, LowRank]] = [{} for _ in used]
    for (name, stack), used_rows in zip(stacks.items(), used.split([s.rank for s in stacks.values()], 1), strict=True):
        for e, rows in enumerate(used_rows):
            per_edit[e][name] = LowRank(_used(stack.A[e], rows), _used(stack.B[e], rows))
    return per_edit


def _used(factor: Tensor, rows: Tensor) -> Tensor:
    """Copies the used rows. These are usually all rows, or all but the padding before the last row."""
    tokens = int(rows[:-1].sum())
    if rows.all():
        return factor.clone()
    if rows[-1] and rows[:tokens].all():
        return torch.cat([factor[:tokens], factor[-1:]])
    return factor[rows.nonzero().squeeze(1).to(factor.device)]


def aligned(rank: int, like: Tensor) -> int:
    """Rounds a rank up to a multiple of eight on a GPU, whose tensor cores multiply eight numbers at a time."""
    return rank + (-rank % 8 if like.is_cuda else 0)


def _add_product(output: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns output + left @ right. Without gradients it adds in place, which saves a copy of each layer's output."""
    return torch.baddbmm(output, left, right) if torch.is_grad_enabled() else output.baddbmm_(left, right)
