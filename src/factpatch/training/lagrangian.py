"""min over φ, max over α of  L + Σ α (C − m): constraints with multipliers, and margins that shrink (§4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Lagrangian(nn.Module):
    """A multiplier α ≥ 0 and a margin m for each constraint, by name."""

    margins: Tensor

    def __init__(self, margins: Mapping[str, tuple[float, float]], factor: float = 0.8, above: float = 0.9):
        """`margins`: where each begins and how far down it may go, by steps of `factor` while success is `above`."""
        super().__init__()
        self.names = tuple(margins)
        self.floors = [floor for _, floor in margins.values()]
        self.factor = factor
        self.above = above
        self.multipliers = nn.Parameter(torch.ones(len(margins)))
        self.register_buffer("margins", torch.tensor([start for start, _ in margins.values()], dtype=torch.float64))

    def penalty(self, values: Tensor) -> Tensor:
        """Σ α C, what the editor descends besides its loss: m has no gradient, and α is not the editor's to move."""
        return (self.multipliers.detach() * values).sum()

    @torch.no_grad()
    def set_gradient(self, values: Tensor) -> None:
        """An optimizer descends; α is to ascend C − m."""
        self.multipliers.grad = (self.margins - values).float()

    @torch.no_grad()
    def clamp(self) -> None:
        """To be called after each step of the optimizer."""
        self.multipliers.clamp_(min=0)

    def anneal(self, success: float) -> None:
        """The paper's schedule: smaller margins once edits succeed."""
        if success > self.above:
            floors = self.margins.new_tensor(self.floors)
            self.margins.copy_(torch.maximum(self.margins * self.factor, floors))

    def margin(self, name: str) -> float | None:
        return float(self.margins[self.names.index(name)]) if name in self.names else None

    def describe(self, values: Sequence[float]) -> dict[str, Any]:
        """Each constraint's value, margin and multiplier."""
        said: dict[str, Any] = {}
        for name, value, margin, multiplier in zip(
            self.names, values, self.margins.tolist(), self.multipliers.tolist(), strict=True
        ):
            said |= {name: value, f"{name}_margin": margin, f"{name}_multiplier": multiplier}
        return said
