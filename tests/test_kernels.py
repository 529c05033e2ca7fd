"""The GPU kernels say what torch says. With TRITON_INTERPRET=1, and Triton installed, they run on a CPU too."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or interpreted):
    pytest.skip("kernels run on a CUDA GPU only, or with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from factpatch.constraints import kl  # noqa: E402
from factpatch.kernels.attention import ShortAttention  # noqa: E402
from factpatch.kernels.divergence import Divergence  # noqa: E402
from factpatch.kernels.norm import Norm  # noqa: E402
from factpatch.kernels.product import edited_product  # noqa: E402

DEVICE = "cpu" if interpreted else "cuda"
DTYPE = torch.float32 if interpreted else torch.bfloat16
TOLERANCE = 1e-5 if interpreted else 3e-2


def same_both_ways(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Outputs, and gradients of the inputs, which torch computes in float32."""
    copies = [x.detach().float().requires_grad_() for x in inputs]
    out, wanted = ours(*inputs), torchs(*copies)
    g = torch.randn_like(wanted)
    found, expected = torch.autograd.grad(out, inputs, g.to(out.dtype)), torch.autograd.grad(wanted, copies, g)
    for one, other in zip((out, *found), (wanted, *expected), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "width"),
    [(32, 32, 3, 32), (13, 13, 2, 24), (7, 21, 2, 16), (64, 50, 2, 64), (1, 9, 2, 64)],
)
def test_attention(queries: int, keys: int, heads: int, width: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(3, tokens, heads, width, device=DEVICE, dtype=DTYPE).transpose(1, 2).requires_grad_()
        for tokens in (queries, keys, keys)
    )
    lengths = torch.tensor([[1], [keys // 2], [keys]], device=DEVICE)
    mask = (torch.arange(keys, device=DEVICE) < lengths)[:, None, None].expand(3, 1, queries, keys)
    for causal in {False, queries == keys and not masked}:
        same_both_ways(
            lambda *qkv, causal=causal: ShortAttention.apply(*qkv, mask if masked else None, width**-0.5, causal),
            lambda *qkv, causal=causal: F.scaled_dot_product_attention(
                *qkv, mask if masked else None, is_causal=causal
            ),
            q,
            k,
            v,
        )


@pytest.mark.parametrize("width", [384, 100])
def test_norm(width: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(2, width, device=DEVICE, dtype=DTYPE)
    same_both_ways(
        lambda x: Norm.apply(x, weight, bias, 1e-5),
        lambda x: F.layer_norm(x, (width,), weight.float(), bias.float(), 1e-5),
        torch.randn(3, 5, width, device=DEVICE, dtype=DTYPE, requires_grad=True),
    )


@pytest.mark.parametrize("width", [576, 100])
def test_rms_norm(width: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(width, device=DEVICE, dtype=DTYPE)
    same_both_ways(
        lambda x: Norm.apply(x, weight, None, 1e-5),
        lambda x: F.rms_norm(x, (width,), weight.float(), 1e-5),
        torch.randn(3, 5, width, device=DEVICE, dtype=DTYPE, requires_grad=True),
    )


@pytest.mark.parametrize("width", [9001, 4096, 1030])
def test_divergence(width: int) -> None:
    """Also where distributions are all but the same, and of a head whose rows are wider than its vocabulary."""
    torch.manual_seed(0)
    p = (4 * torch.randn(5, width + 6, device=DEVICE, dtype=DTYPE))[:, :width]
    for apart in (1.0, 0.01):
        wider = F.pad(p + apart * torch.randn_like(p), (0, 6)).requires_grad_()
        exact = wider.detach().double().requires_grad_()
        found, wanted = Divergence.apply(p, wider[:, :width]), kl(p.double(), exact[:, :width])
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-6)
        weights = torch.arange(1.0, 6.0, device=DEVICE)
        (gradient,) = torch.autograd.grad(found, wider, weights)
        (expected,) = torch.autograd.grad(wanted, exact, weights.double())
        # A probability in float32, and a GPU's exp, are off by 1e-7 or so, of which five are taken here.
        torch.testing.assert_close(
            gradient.double(), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()) + 2e-6
        )


def test_kl_over_a_vocabulary_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.randn(2, 3, 2000, device=DEVICE, dtype=DTYPE)
    expected = kl(p.float(), q.float())
    monkeypatch.setattr("factpatch.constraints.kernels_support", lambda x: True)
    monkeypatch.setattr("torch.Tensor.log_softmax", None)
    torch.testing.assert_close(kl(p, q), expected, rtol=1e-4, atol=1e-5)


def test_divergence_of_what_is_no_number() -> None:
    p, q = torch.randn(2, 3, 2000, device=DEVICE, dtype=DTYPE)
    q[1, 5] = float("nan")
    assert Divergence.apply(p, q).isnan().tolist() == [False, True, False]


def test_divergence_of_what_is_never_said() -> None:
    p, q = torch.randn(2, 3, 2000, device=DEVICE, dtype=DTYPE)
    p[:, 7] = q[:, 7] = p[:, 1999] = float("-inf")
    seen = [i for i in range(2000) if i not in (7, 1999)]
    wide = torch.cat([q[:, seen], q[:, 1999:]], 1)
    narrow = torch.cat([p[:, seen], torch.full_like(p[:, :1], -1e4)], 1)
    torch.testing.assert_close(Divergence.apply(p, q), kl(narrow.float(), wide.float()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "width", "outputs", "rank", "turned"),
    [(128, 64, 128, 16, False), (70, 128, 100, 24, False), (96, 64, 192, 40, True)],
)
def test_edited_product(tokens: int, width: int, outputs: int, rank: int, turned: bool) -> None:
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE) / 8

    x, weight, bias = 8 * random(3 * tokens, width), random(outputs, width), random(outputs)
    weight = weight.T.contiguous().T if turned else weight
    A, B = random(3, rank, width), random(3, rank, outputs)
    out, left = edited_product(x, weight, None if turned else bias, A, B)
    wanted_left = x.view(3, tokens, width).float() @ A.float().mT
    wanted = F.linear(x.float(), weight.float(), None if turned else bias.float()).view(3, tokens, outputs)
    torch.testing.assert_close(left.float(), wanted_left, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(
        out.view(3, tokens, outputs).float(), wanted + left.float() @ B.float(), rtol=TOLERANCE, atol=TOLERANCE
    )
