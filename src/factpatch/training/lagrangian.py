"""Optimisation with multipliers: min over φ, max over α of  L + Σ α (C − m)  (De Cao et al., 2021, §4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Lagrangian(nn.Module):
    """A multiplier α ≥ 0 and a margin m for each constraint C, by name, with the optimizer of the multipliers."""

    margins: Tensor

    def __init__(
        self,
        margins: Mapping[str, tuple[float, float]],
        factor: float = 0.8,
        above: float = 0.9,
        optimizer: str = "rmsprop",
        constant: float | None = None,
    ):
        """`margins` maps each constraint to its initial and its smallest margin; `anneal` multiplies by `factor`.

        With `constant`, every multiplier keeps this value: the objective is then a plain weighted sum.
        """
        super().__init__()
        self.names = tuple(margins)
        self.floors = [floor for _, floor in margins.values()]
        self.factor = factor
        self.above = above
        self.multipliers = nn.Parameter(torch.full((len(margins),), 1.0 if constant is None else constant))
        self.constant = constant is not None
        self.register_buffer("margins", torch.tensor([start for start, _ in margins.values()], dtype=torch.float64))
        # Not centred: while C stays far below m, the gradient hardly varies, and its variance, a difference of two
        # nearly equal numbers, would be rounded to below 0.
        kind = torch.optim.Adam if optimizer == "adam" else torch.optim.RMSprop
        self.optimizer: torch.optim.Optimizer = kind([self.multipliers])

    def penalty(self, values: Tensor) -> Tensor:
        """Returns Σ α C, which is added to the editor's loss. It has no gradient with respect to α."""
        return (self.multipliers.detach() * values).sum()

    @torch.no_grad()
    def update(self, values: Tensor, lr: float) -> None:
        """Makes one step of gradient ascent: α grows where C − m is positive."""
        if self.constant:
            return
        self.multipliers.grad = (self.margins - values).float()  # optimizers descend
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.multipliers.clamp_(min=0)

    def anneal(self, success: float) -> None:
        """Shrinks the margins if edits succeed (the paper's schedule)."""
        if success > self.above:
            floors = self.margins.new_tensor(self.floors)
            self.margins.copy_(torch.maximum(self.margins * self.factor, floors))

    def margin(self, name: str) -> float | None:
        return float(self.margins[self.names.index(name)]) if name in self.names else None

    def describe(self, values: Sequence[float]) -> dict[str, Any]:
        """Returns the value, margin and multiplier of each constraint, for metrics."""
        found: dict[str, Any] = {}
        for name, value, margin, multiplier in zip(
            self.names, values, self.margins.tolist(), self.multipliers.tolist(), strict=True
        ):
            found |= {name: value, f"{name}_margin": margin, f"{name}_multiplier": multiplier}
        return found
