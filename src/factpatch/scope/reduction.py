"""Principal components of the hidden states of tokens, on which a comparer is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from factpatch.scope.comparer import Comparer

COMPONENTS = 256  # number of principal components that are kept
SAMPLE_TOKENS = 16_384  # number of tokens that they are computed from


@dataclass(frozen=True)
class Reduction:
    """Reduces the hidden states h of a token to the principal components of standardised states: z = B (h − μ).

    The training texts fit into memory only in this form, and a comparer learns faster from it.
    """

    mean: Tensor  # (features,)
    basis: Tensor  # (components, features); includes the standardisation

    @classmethod
    def fit(cls, states: Tensor, seed: int) -> Reduction:
        """Finds the principal components of a sample of hidden states, (tokens, features)."""
        states = states[:SAMPLE_TOKENS]
        mean, scale = states.mean(0), states.std(0).clamp_min(1e-6)
        kept = min(COMPONENTS, *states.shape)
        with torch.random.fork_rng(devices=[states.device] if states.is_cuda else []):  # a randomised algorithm
            torch.manual_seed(seed)
            _, lengths, directions = torch.pca_lowrank((states - mean) / scale, kept, center=False)
        # Dividing by their typical size gives the components a mean square of 1.
        typical = (lengths.square().mean() / len(states)).sqrt().clamp_min(1e-6)
        return cls(mean, directions.T / (scale * typical))

    def __call__(self, states: Tensor) -> Tensor:
        """Reduces hidden states: (tokens, components)."""
        return (states - self.mean) @ self.basis.T

    def folded_into(self, comparer: Comparer) -> Comparer:
        """Changes a comparer of reduced states so that it reads the hidden states themselves, and returns it.

        W (B (h − μ)) + b becomes (W B) h + (b − W B μ).
        """
        reduced = comparer.project
        full = nn.Linear(len(self.mean), len(reduced.bias), device=self.mean.device)
        full.weight.data = reduced.weight.data @ self.basis
        full.bias.data = reduced.bias.data - full.weight.data @ self.mean
        comparer.project = full.requires_grad_(False)
        return comparer
