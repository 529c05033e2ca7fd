"""The moving average of an editor's weights over its training, which is smoother than the weights of the last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class MovingAverage(nn.Module):
    """An exponential moving average of a network's parameters: mean ← d · mean + (1 − d) · parameters.

    In the first steps d is (1 + step) / (10 + step), if that is less than `decay`, so that the average soon forgets
    the weights it started from.
    """

    def __init__(self, network: nn.Module, decay: float):
        super().__init__()
        self.decay = decay
        copies = [nn.Parameter(parameter.detach().clone(), requires_grad=False) for parameter in network.parameters()]
        self.means = nn.ParameterList(copies)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Adds the parameters as they are after a step, without waiting for the device."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.means), list(network.parameters()), 1 - decay)  # pyright: ignore (private in torch)

    @contextmanager
    def used_by(self, network: nn.Module) -> Iterator[None]:
        """Gives the network the averaged parameters for a `with` block, in the same memory, as CUDA graphs need it."""
        parameters = list(network.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, list(self.means))  # pyright: ignore (private in torch)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)  # pyright: ignore (private in torch)
