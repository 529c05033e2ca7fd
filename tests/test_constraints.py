"""KL and Lp against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from factpatch.constraints import kl, lp
from factpatch.deltas import Dense, LowRank


def test_kl_by_hand() -> None:
    before = torch.tensor([[0.5, 0.5], [0.8, 0.2]]).log() + 7.0  # logits may be off by a constant
    after = torch.tensor([[0.9, 0.1], [0.8, 0.2]]).log() - 2.0
    expected = [0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 0.0]
    assert kl(before, after).tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_is_not_symmetric_and_takes_the_unedited_model_first() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl(p, q).item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)
    assert kl(p, q).item() != pytest.approx(kl(q, p).item(), abs=1e-3)


# ΔW = Bᵀ A = [[3, 6], [0, 0], [-1, -2]]: squares 9 + 36 + 1 + 4 = 50 over 6 values, absolutes 12
FACTORS = LowRank(A=torch.tensor([[1.0, 2.0]]), B=torch.tensor([[3.0, 0.0, -1.0]]))


@pytest.mark.parametrize(
    ("p", "expected"), [(2.0, math.sqrt(50 / 6)), (1.0, 12 / 6), (3.0, ((27 + 216 + 1 + 8) / 6) ** (1 / 3))]
)
def test_lp_by_hand(p: float, expected: float) -> None:
    assert lp({"w": FACTORS}, p).item() == pytest.approx(expected, rel=1e-6)
    assert lp({"w": Dense(FACTORS.dense())}, p).item() == pytest.approx(expected, rel=1e-6)


def test_lp_is_a_mean_over_weights_for_each_edit() -> None:
    twice = LowRank(torch.stack([FACTORS.A, 2 * FACTORS.A]), torch.stack([FACTORS.B, FACTORS.B]))
    ones = Dense(torch.ones(2, 4, 4))
    root = math.sqrt(50 / 6)
    assert lp({"a": twice, "b": ones}).tolist() == pytest.approx([(root + 1) / 2, (2 * root + 1) / 2])


def test_lp_from_factors_has_the_gradient_of_the_dense_one() -> None:
    torch.manual_seed(0)
    A, B = torch.randn(3, 5, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    from_factors = torch.autograd.grad(lp({"w": LowRank(A, B)}), [A, B])
    dense = torch.autograd.grad((B.mT @ A).square().mean().sqrt(), [A, B])
    for ours, theirs in zip(from_factors, dense, strict=True):
        torch.testing.assert_close(ours, theirs)
