"""Margins and multipliers, on a problem whose solution is known."""

from __future__ import annotations

import pytest
import torch

from factpatch.training.lagrangian import Lagrangian


def solve(margin: float, steps: int = 4000) -> tuple[float, float]:
    """min (w − 3)² where w² ≤ margin, by descent in w and ascent in α."""
    w = torch.nn.Parameter(torch.tensor(0.0))
    lagrangian = Lagrangian({"square": (margin, margin)})
    lagrangian.optimizer = torch.optim.SGD([lagrangian.multipliers])
    optimizer = torch.optim.SGD([w], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        value = (w**2)[None]
        ((w - 3) ** 2 + lagrangian.penalty(value)).backward()
        optimizer.step()
        lagrangian.update(value.detach(), lr=1e-1)
    return w.item(), lagrangian.multipliers.item()


def test_a_constraint_that_binds() -> None:
    """At w = 1 the slopes balance: 2 (3 − w) = 2 α w, so α = 2."""
    w, multiplier = solve(margin=1.0)
    assert w == pytest.approx(1.0, abs=1e-3)
    assert multiplier == pytest.approx(2.0, abs=1e-2)


def test_a_constraint_that_does_not_bind() -> None:
    w, multiplier = solve(margin=100.0)
    assert w == pytest.approx(3.0, abs=1e-3)
    assert multiplier == 0.0, "multipliers are never negative"


def test_multipliers_start_at_one_and_move_with_the_violation() -> None:
    lagrangian = Lagrangian({"kl": (0.1, 0.01), "lp": (0.5, 0.5)})
    assert lagrangian.multipliers.tolist() == [1.0, 1.0]
    lagrangian.optimizer = torch.optim.SGD([lagrangian.multipliers])
    lagrangian.update(torch.tensor([0.3, 0.1]), lr=0.1)
    assert lagrangian.multipliers.tolist() == pytest.approx([1.02, 0.96]), "ascent in C − m"


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_constraint_far_below_its_margin_gives_no_nan(optimizer: str) -> None:
    """A centred optimizer would divide by the root of the gradient's variance, which rounding makes negative here."""
    lagrangian = Lagrangian({"kl": (1e-1, 1e-3)}, optimizer=optimizer)
    for step in range(2000):
        lagrangian.update(torch.tensor([1e-6 * (1 + step * 7919 % 101 / 101)]), lr=0.1)
    assert lagrangian.multipliers.tolist() == [0.0]
    for _ in range(2000):
        lagrangian.update(torch.tensor([0.2]), lr=0.1)
    assert 1 < lagrangian.multipliers.item() < float("inf"), "it rises again once the constraint is violated"


def test_the_penalty_moves_the_editor_alone() -> None:
    lagrangian = Lagrangian({"kl": (0.1, 0.01)})
    value = torch.tensor([2.0], requires_grad=True)
    lagrangian.penalty(value).backward()
    assert value.grad is not None
    assert value.grad.tolist() == [1.0]
    assert lagrangian.multipliers.grad is None


def test_margins_shrink_where_edits_succeed_down_to_their_floor() -> None:
    lagrangian = Lagrangian({"kl": (1e-1, 5e-2)}, factor=0.8, above=0.9)
    seen = []
    for success in (0.5, 0.9, 0.91, 1.0, 0.89, 0.95, 0.95, 0.95):
        lagrangian.anneal(success)
        seen.append(lagrangian.margin("kl"))
    assert seen == pytest.approx([0.1, 0.1, 0.08, 0.064, 0.064, 0.0512, 0.05, 0.05])
    assert lagrangian.margin("lp") is None


def test_from_margin_to_floor_takes_twenty_one_steps() -> None:
    lagrangian = Lagrangian({"kl": (1e-1, 1e-3)})
    margins = []
    for _ in range(25):
        lagrangian.anneal(1.0)
        margins.append(lagrangian.margin("kl"))
    assert margins.index(1e-3) == 20
