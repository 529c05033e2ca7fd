"""Faster replacements for parts of a model on a GPU. On other devices these parts work as before.

- Attention over short texts: torch's kernels are designed for long ones, and most of their tiles would be empty.
- Layer norms: torch's kernel reaches only a fifth of the memory bandwidth at common widths.
- RMS norms: transformers computes them in eight passes over the data, and their gradients in fourteen.
- LM heads whose vocabulary size is not a multiple of eight, such as Marian's: tensor cores are slow for such sizes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from factpatch.kernels import kernels_support

MULTIPLE = 8  # tensor cores are fast for numbers of rows that are multiples of this
LONGEST, WIDEST = 64, 128  # maximum number of tokens and head width that the attention kernel supports
WIDEST_NORM = 8192


def use_gpu_kernels(model: PreTrainedModel) -> None:
    """Replaces slow parts of the model. Its outputs stay the same up to rounding."""
    if not torch.cuda.is_available():
        return
    for module in model.modules():
        if type(module) is nn.LayerNorm and module.bias is not None and len(module.normalized_shape) == 1:
            module.__class__ = frozen_norm(nn.LayerNorm)
        elif is_rms_norm(module) and not isinstance(module, FrozenNorm):
            module.__class__ = frozen_norm(type(module))
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("short")


class FrozenNorm(nn.Module):
    """A norm that uses our kernel while its weights are frozen. `frozen_norm` combines it with the norm's own class."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        frozen = not self.weight.requires_grad and not torch.compiler.is_compiling()
        fits = hidden_states.shape[-1] <= WIDEST_NORM and hidden_states.dtype == self.weight.dtype
        if not (frozen and fits and kernels_support(hidden_states)):
            return super().forward(hidden_states)
        from factpatch.kernels.norm import Norm

        centred = isinstance(self, nn.LayerNorm)
        bias, epsilon = (self.bias, self.eps) if centred else (None, self.variance_epsilon)
        return Norm.apply(hidden_states, self.weight, bias, epsilon)


@cache
def frozen_norm(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of a layer norm or an RMS norm that is a FrozenNorm."""
    return type("FrozenNorm", (FrozenNorm, kind), {})


def is_rms_norm(module: nn.Module) -> bool:
    """Returns True if a module of transformers computes x / √(mean(x²) + ε) · weight.

    Every family of models has a class of its own for this, so the module is tried out.
    """
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        found = module(x)
        expected = x.float() * (x.float().square().mean() + epsilon).rsqrt() * weight.float()
    return found.shape == x.shape and torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-4)


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes what transformers' `sdpa_attention_forward` computes: (rows, tokens, heads, width)."""
    rows, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]  # with grouped-query attention, several query heads share a key head
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and queries > 1  # a single query, during generation, sees all earlier tokens
    short = (
        queries <= LONGEST
        and keys <= LONGEST
        and width <= WIDEST
        and key.shape == value.shape == (rows, key_heads, keys, width)
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
        and (queries == keys or not causal)
        and dropout == 0
        and options.get("position_bias") is None
        and kernels_support(query)
    )
    if not short:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling=scaling, is_causal=is_causal, **options
        )
    from factpatch.kernels.attention import ShortAttention

    if key_heads < heads:
        key, value = (tensor.repeat_interleave(heads // key_heads, dim=1) for tensor in (key, value))
    mask = None if attention_mask is None else attention_mask.expand(rows, 1, queries, keys)
    scale = width**-0.5 if scaling is None else scaling
    return ShortAttention.apply(query, key, value, mask, scale, causal).transpose(1, 2), None


AttentionInterface.register("short", attend)
AttentionMaskInterface.register("short", sdpa_mask)


class AlignedLinear(nn.Linear):
    """A Linear that, while frozen and on a GPU, multiplies with a copy of its weight that is padded with zero rows."""

    _padded: tuple[tuple[object, ...], Tensor, Tensor | None] | None = None  # state of the weight, weight, bias

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore (the decorator loses its type)
        weight = self.weight
        if weight.requires_grad or weight.is_inference() or not weight.is_cuda:
            return super().forward(input)
        state = (weight.data_ptr(), weight.dtype, weight.device, weight._version)
        if self._padded is None or self._padded[0] != state:
            with torch.inference_mode(False):
                self._padded = (state, pad_rows(weight), None if self.bias is None else pad_rows(self.bias))
        return F.linear(input, *self._padded[1:])[..., : len(weight)]


def align(head: nn.Module) -> None:
    """Turns a linear layer into an AlignedLinear if its number of outputs is not a multiple of eight."""
    if type(head) is nn.Linear and len(head.weight) % MULTIPLE:
        head.__class__ = AlignedLinear


def pad_rows(tensor: Tensor) -> Tensor:
    """Appends zero rows to a tensor, up to a multiple of eight rows."""
    missing = -len(tensor) % MULTIPLE
    return torch.cat([tensor.detach(), tensor.new_zeros(missing, *tensor.shape[1:])])
