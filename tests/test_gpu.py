"""Parts of a model that are replaced on a GPU: LM heads padded for tensor cores, and RMS norms."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from factpatch.models.gpu import align, frozen_norm, is_rms_norm, pad_rows


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


@pytest.mark.parametrize(("architecture", "norms"), [("llama", 5), ("qwen2", 5), ("t5", 12), ("gemma3", 0)])
def test_rms_norms_are_recognised_by_what_they_compute(architecture: str, norms: int) -> None:
    """Gemma multiplies by 1 + weight, so its norms are left as they are."""
    network = tiny.build(architecture).model
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)  # a weight of 1 could hide a difference
    assert sum(map(is_rms_norm, network.modules())) == norms


def test_a_frozen_norm_says_the_same() -> None:
    norm = LlamaRMSNorm(16)
    x = torch.randn(3, 16)
    names, before, kind = list(norm.state_dict()), norm(x), type(norm)
    norm.__class__ = frozen_norm(kind)
    assert isinstance(norm, kind)
    assert list(norm.state_dict()) == names
    assert torch.equal(norm(x), before)
