"""KnowledgeEditor (De Cao, Aziz, Titov, 2021, §4): a hyper-network that predicts a weight update from one fact.

For one weight W (out × in), with inputs X and output gradients D of the fact's tokens (engine.capture),

    ΔW = s · ( r cᵀ ⊙ Dᵀ X  +  r' c'ᵀ ),    s = max_scale · sigmoid(η),    r, r' = softmaxes over the out dimension

which equals the following product, computed without a matrix of that size:

    ΔW = Bᵀ A,    A = [X ⊙ c ; c'],    B = s · [D ⊙ r ; r']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from factpatch.deltas import Delta
from factpatch.editors.network import EditorConfig, FactEncoder, WeightGroup, read_states
from factpatch.editors.trainable import Condition, TrainableEditor
from factpatch.engine import Trace
from factpatch.facts import FactEdit


class HyperNetwork(TrainableEditor):
    """A hyper-network that edits one model."""

    name = "hyper"
    config_class = EditorConfig

    def __init__(self, shapes: Mapping[str, tuple[int, int]], embeddings: Tensor, base: str, config: EditorConfig):
        super().__init__(shapes, embeddings, base, config)
        self.read = first_of_last_blocks(shapes) if config.states else []
        self.fact_encoder = FactEncoder(embeddings, config, sum(shapes[name][1] for name in self.read))
        self.groups = nn.ModuleDict(
            {key: WeightGroup(len(names), *shapes[names[0]], config) for key, names in self.weights_of.items()}
        )

    def condition_text(self, edit: FactEdit) -> str:
        """Returns the edit as text. Only the LSTM reads it: it is never parsed back, and never truncated."""
        return f"{edit.y} >> {edit.a} || {edit.x}"

    def forward(self, condition: Condition, traces: Mapping[str, Trace]) -> dict[str, Delta]:
        """Returns the factors of all edits, one stack per weight."""
        states = read_states([traces[name] for name in self.read]) if self.read else None
        h = self.fact_encoder(condition, states)  # (edits, width)
        deltas: dict[str, Delta] = {}
        for key, group in self.groups.items():
            gates = group(h)
            for indices in _by_trace_shape(self.weights_of[key], traces):
                names = [self.weights_of[key][i] for i in indices]
                factors = gates.factors(indices, [traces[name] for name in names], self.config.gradients)
                deltas |= zip(names, factors, strict=True)
        return deltas


def first_of_last_blocks(names: Iterable[str]) -> list[str]:
    """Returns the first weight in the last block of each stack, such as the encoder's and the decoder's.

    The names contain the blocks' numbers and are in the model's order.
    """
    last: dict[str, tuple[int, str]] = {}
    for name in names:
        stack, number, *_ = re.split(r"\.(\d+)\.", name, maxsplit=1)
        if stack not in last or int(number) > last[stack][0]:
            last[stack] = int(number), name
    return [name for _, name in last.values()]


def _by_trace_shape(names: Sequence[str], traces: Mapping[str, Trace]) -> list[list[int]]:
    """Returns the indices of the traced weights, grouped by the shape of their traces."""
    groups: dict[torch.Size, list[int]] = {}
    for i, name in enumerate(names):
        if name in traces:
            groups.setdefault(traces[name].X.shape, []).append(i)
    return list(groups.values())
