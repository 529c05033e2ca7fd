"""LM heads that are padded for a GPU's tensor cores."""

from __future__ import annotations

import pytest
import torch

from factpatch.models.gpu import align, pad_rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="is for CUDA GPUs only")
def test_an_aligned_head_says_the_same() -> None:
    head = torch.nn.Linear(16, 21).cuda().requires_grad_(False)
    x = torch.randn(5, 16, device="cuda")
    before = head(x)
    align(head)
    for _ in range(2):
        torch.testing.assert_close(head(x), before)
    head.weight.mul_(2)
    torch.testing.assert_close(head(x) - head.bias, 2 * (before - head.bias))


def test_an_aligned_head_is_stored_as_it_was() -> None:
    head = torch.nn.Linear(16, 21)
    x = torch.randn(5, 16)
    names, before = list(head.state_dict()), head(x)
    align(head)
    assert list(head.state_dict()) == names
    assert torch.equal(head(x), before)
    assert torch.equal(pad_rows(head.weight)[:21], head.weight)
    assert pad_rows(head.bias).shape == (24,)
