"""MEND (Mitchell et al., 2022): a network that transforms the gradient of an edit, token by token.

For one weight W (out × in), with input u and output gradient g of a token (engine.capture), both normalised by the mean
and standard deviation of a sample of edits,

    z = [u; g],    h = z + ReLU(s₁ ⊙ U₁ V₁ z + o₁),    [ũ; g̃] = h + ReLU(s₂ ⊙ U₂ V₂ h + o₂),    ΔW = −η Σ g̃ ũᵀ

where U and V are shared by all weights of one shape, and s, o and η belong to one weight. This is ΔW = Bᵀ A with the
tokens' ũ as the rows of A and −η g̃ as the rows of B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from factpatch.data.revisions import Revision, edit_of
from factpatch.deltas import Delta, LowRank
from factpatch.editors.base import check_above_zero
from factpatch.editors.normalising import Moments, add_traces, normalised, with_gradient
from factpatch.editors.trainable import Condition, TrainableEditor
from factpatch.engine import Trace
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.layers import feed_forward_weights
from factpatch.models.rows import in_batches

SAMPLE = 1024  # edits from which means and standard deviations are computed
SPEED = 30.0  # η = exp(SPEED · θ): optimizer steps are small beside log η, so that η would otherwise hardly change


@dataclass(frozen=True)
class MendConfig:
    """Sizes of the network. The defaults are those of Mitchell et al. (2022)."""

    rank: int = 1920  # of U V, at most in + out
    blocks: int = 3  # edits the feed-forward weights of the last blocks of each stack, unless `layers` names others
    rate: float | None = None  # initial η; None means 1e-4 for a classifier and 1e-5 for other models

    def __post_init__(self) -> None:
        check_above_zero(self, "rank", "blocks", "rate", subject="MEND settings")


class Mend(TrainableEditor):
    """A gradient-transforming network that edits one model."""

    name = "mend"
    config_class = MendConfig

    def __init__(self, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: MendConfig):
        super().__init__(shapes, embeddings, base, config)
        self.groups = nn.ModuleDict(
            {key: Transform(len(names), sum(shapes[names[0]]), config) for key, names in self.weights_of.items()}
        )

    @classmethod
    def for_model(cls, model: TaskModel, config: MendConfig | None = None, layers: Sequence[str] = ("*",)) -> Self:
        config = config or MendConfig()
        if config.rate is None:
            config = replace(config, rate=1e-4 if model.kind == "classifier" else 1e-5)
        if tuple(layers) == ("*",):
            last = feed_forward_weights(model.model, model.layers, config.blocks)
            layers = [name for names in last.values() for name in names]
        return super().for_model(model, config, layers)

    def condition_text(self, edit: FactEdit) -> str:
        return ""

    def calibrated(self, model: TaskModel, sample: Sequence[Revision]) -> Self:
        """Sets the means and standard deviations to those of a sample of edits."""
        self.prepare(model)
        edits = [edit_of(revision) for revision in sample if revision.alternatives][:SAMPLE]
        moments: dict[str, Moments] = {}
        for batch in in_batches(edits, self.edits_per_batch(model)):
            moments = add_traces(moments, self.trace(model, self.batch(model, batch)))
        for key, names in self.weights_of.items():
            group = self.groups[key]
            assert isinstance(group, Transform)
            for i, name in enumerate(names):
                if name in moments:
                    group.mean[i], group.std[i] = moments[name].mean, moments[name].std
        return self

    def forward(self, condition: Condition, traces: Mapping[str, Trace]) -> dict[str, Delta]:
        """Returns the factors of all edits, one stack per weight."""
        deltas: dict[str, Delta] = {}
        for key, names in self.weights_of.items():
            for i, name in enumerate(names):
                if name in traces:
                    deltas[name] = self.groups[key](i, traces[name])
        return deltas


class Transform(nn.Module):
    """The network of all weights of one shape."""

    mean: Tensor
    std: Tensor

    def __init__(self, weights: int, width: int, config: MendConfig):
        super().__init__()
        rank = min(config.rank, width)
        self.U = nn.Parameter(torch.zeros(2, width, rank))  # zeros: at first the network is the identity
        self.V = nn.Parameter(torch.randn(2, rank, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(weights, 2, width))
        self.shift = nn.Parameter(torch.zeros(weights, 2, width))
        self.log_rate = nn.Parameter(torch.full((weights,), math.log(config.rate or 1e-5) / SPEED))
        self.register_buffer("mean", torch.zeros(weights, width))
        self.register_buffer("std", torch.ones(weights, width))

    def forward(self, weight: int, trace: Trace) -> LowRank:
        """Returns A = ũ (edits, tokens, in) and B = −η g̃ (edits, tokens, out) of one weight, in the model's dtype."""
        u, g = normalised(trace, self.mean[weight], self.std[weight])
        z = torch.cat([u, g], dim=-1)  # (edits, tokens, in + out)
        for layer in range(2):
            lifted = z @ self.V[layer].mT @ self.U[layer].mT * self.scale[weight, layer] + self.shift[weight, layer]
            z = z + lifted.clamp(min=0)  # unlike relu, clamp has a gradient at 0, where training starts
        u, g = z.split([u.shape[-1], g.shape[-1]], dim=-1)
        rate = (SPEED * self.log_rate[weight]).exp()
        g = -rate * g * with_gradient(trace)[..., None]
        return LowRank(u.to(trace.X.dtype), g.to(trace.D.dtype))
