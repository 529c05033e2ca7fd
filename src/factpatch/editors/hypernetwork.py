"""KnowledgeEditor (De Cao, Aziz, Titov, 2021, §4): a hyper-network that predicts a weight update from one fact.

For one weight W (out × in), with inputs X and output gradients D of the fact's tokens (engine.capture),

    ΔW = s · ( r cᵀ ⊙ Dᵀ X  +  r' c'ᵀ ),    s = max_scale · sigmoid(η),    r, r' = softmaxes over the out dimension

which equals the following product, computed without a matrix of that size:

    ΔW = Bᵀ A,    A = [X ⊙ c ; c'],    B = s · [D ⊙ r ; r']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from factpatch.deltas import Delta
from factpatch.editors.network import EditorConfig, FactEncoder, WeightGroup
from factpatch.editors.trainable import Condition, TrainableEditor
from factpatch.engine import Trace
from factpatch.facts import FactEdit


class HyperNetwork(TrainableEditor):
    """A hyper-network that edits one model."""

    name = "hyper"
    config_class = EditorConfig

    def __init__(self, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: EditorConfig):
        super().__init__(shapes, base, config)
        self.fact_encoder = FactEncoder(embeddings, config)
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, shape in shapes.items():
            by_shape.setdefault(shape, []).append(name)
        self.weights_of = {f"{out}x{in_}": names for (out, in_), names in by_shape.items()}
        self.groups = nn.ModuleDict(
            {f"{out}x{in_}": WeightGroup(len(names), out, in_, config) for (out, in_), names in by_shape.items()}
        )

    @classmethod
    def build(cls, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: Any) -> Self:
        return cls(shapes, embeddings, base, config)

    def condition_text(self, edit: FactEdit) -> str:
        """Returns the edit as text. Only the LSTM reads it: it is never parsed back, and never truncated."""
        return f"{edit.y} >> {edit.a} || {edit.x}"

    def forward(self, condition: Condition, traces: Mapping[str, Trace]) -> dict[str, Delta]:
        """Returns the factors of all edits, one stack per weight."""
        h = self.fact_encoder(condition)  # (edits, width)
        deltas: dict[str, Delta] = {}
        for key, group in self.groups.items():
            gates = group(h)
            for chosen in _alike(self.weights_of[key], traces):
                names = [self.weights_of[key][i] for i in chosen]
                factors = gates.factors(chosen, [traces[name] for name in names], self.config.gradients)
                deltas |= zip(names, factors, strict=True)
        return deltas


def _alike(names: Sequence[str], traces: Mapping[str, Trace]) -> list[list[int]]:
    """Indices of the traced weights, grouped by the number of tokens that reached them."""
    alike: dict[torch.Size, list[int]] = {}
    for i, name in enumerate(names):
        if name in traces:
            alike.setdefault(traces[name].X.shape, []).append(i)
    return list(alike.values())
