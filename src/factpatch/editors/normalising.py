"""Running mean and standard deviation of [u; g], a layer's input and output gradient at the tokens of edits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from factpatch.engine import Trace

EPSILON = 1e-7  # added to standard deviations


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of the vectors that were added so far."""

    count: int
    mean: Tensor  # (width,)
    squares: Tensor  # (width,)  sum of squared distances from the mean

    @classmethod
    def empty(cls, width: int, like: Tensor) -> Self:
        zeros = torch.zeros(width, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
        return cls(0, zeros, zeros)

    def plus(self, x: Tensor) -> Self:
        """Adds vectors (rows, width) by the parallel form of Welford's update, and returns the new moments."""
        if not len(x):
            return self
        x = x.to(self.mean.dtype)
        count, mean = self.count + len(x), x.mean(0)
        difference = mean - self.mean
        squares = self.squares + (x - mean).square().sum(0) + difference.square() * (self.count * len(x) / count)
        return type(self)(count, self.mean + difference * (len(x) / count), squares)

    @property
    def std(self) -> Tensor:
        """The standard deviation; 1 where it is unknown or 0, as for a ReLU unit that the sample never activates."""
        std = (self.squares / max(self.count - 1, 1)).sqrt()
        return std.where(std > 0, 1.0)


def joined(trace: Trace) -> Tensor:
    """Concatenates u and g at each token: (edits, tokens, in + out)."""
    dtype = torch.promote_types(trace.X.dtype, torch.float32)
    return torch.cat([trace.X, trace.D], dim=-1).to(dtype)


def with_gradient(trace: Trace) -> Tensor:
    """Returns a mask of the tokens that have a gradient: (edits, tokens). Padding has none."""
    return trace.D.ne(0).any(-1)


def add_traces(moments: Mapping[str, Moments], traces: Mapping[str, Trace]) -> dict[str, Moments]:
    """Adds traces to the moments of each layer's [u; g], and returns the new moments."""
    sums = dict(moments)
    for name, trace in traces.items():
        both = joined(trace)
        before = sums.get(name) or Moments.empty(both.shape[-1], both)
        sums[name] = before.plus(both[with_gradient(trace)])
    return sums


def normalised(trace: Trace, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Returns û (edits, tokens, in) and ĝ (edits, tokens, out); both are zero at tokens without a gradient."""
    both = (joined(trace) - mean) / (std + EPSILON)
    both = both * with_gradient(trace)[..., None]
    return both.split([trace.X.shape[-1], trace.D.shape[-1]], dim=-1)  # pyright: ignore[reportReturnType]
