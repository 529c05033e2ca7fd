"""LM heads whose vocabulary is no multiple of eight, such as Marian's, run several times faster on a GPU when it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 8  # of rows, that tensor cores take well


class AlignedLinear(nn.Linear):
    """Says what a Linear says; while frozen, multiplies with a copy of its weight that is filled up with zeros."""

    _filled: tuple[tuple[object, ...], Tensor, Tensor | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.requires_grad or weight.is_inference() or not weight.is_cuda:
            return super().forward(input)
        state = (weight.data_ptr(), weight.dtype, weight.device, weight._version)
        if self._filled is None or self._filled[0] != state:
            with torch.inference_mode(False):
                self._filled = (state, fill(weight), None if self.bias is None else fill(self.bias))
        return F.linear(input, *self._filled[1:])[..., : len(weight)]


def align(head: nn.Module) -> None:
    if type(head) is nn.Linear and len(head.weight) % MULTIPLE:
        head.__class__ = AlignedLinear


def fill(tensor: Tensor) -> Tensor:
    missing = -len(tensor) % MULTIPLE
    return torch.cat([tensor.detach(), tensor.new_zeros(missing, *tensor.shape[1:])])
