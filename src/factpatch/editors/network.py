"""The hyper-network's own layers: from a fact's text to the vectors that scale its gradient (see hypernetwork.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.deltas import LowRank, aligned
from factpatch.editors.base import check_above_zero
from factpatch.editors.trainable import Condition
from factpatch.engine import Trace

LARGE_EMBEDDINGS = 64_000_000  # parameters above which the editor's copy of the word embeddings is reduced
REDUCED_WIDTH = 128


@dataclass(frozen=True)
class EditorConfig:
    """Sizes of the hyper-network. The defaults are those of De Cao et al. (2021)."""

    width: int = 1024  # of h, the vector that encodes the fact
    bottleneck: int = 128  # of each weight's own network
    lstm: int = 128  # units per direction
    max_scale: float = 1.0  # maximum of the scale s
    embedding: int | None = None  # width of the word embeddings; None: the model's, or 128 if these are very large
    gradients: bool = True  # False omits the gradient's term, as in the paper's ablation
    states: bool = False  # whether h also depends on the model's own hidden states of the fact

    def __post_init__(self) -> None:
        check_above_zero(self, "width", "bottleneck", "lstm", "max_scale", "embedding", subject="editor sizes")


class FactEncoder(nn.Module):
    """Encodes a fact as h: its text by an embedding and a bidirectional LSTM, then one linear layer.

    With `states`, h also depends on hidden states of the model, by a second linear layer that starts at zero.
    """

    def __init__(self, embeddings: Tensor, config: EditorConfig, states: int = 0):
        """`states` is the width of the hidden states, 0 for none."""
        super().__init__()
        large = embeddings.numel() > LARGE_EMBEDDINGS
        embeddings = reduced(embeddings, config.embedding or (REDUCED_WIDTH if large else embeddings.shape[1]))
        self.embedding = nn.Embedding.from_pretrained(embeddings, freeze=False)
        # Two one-way LSTMs: the backward one reads each text reversed within its own length, so that it never starts on
        # padding and no lengths have to be copied to the host.
        self.forwards = nn.LSTM(embeddings.shape[1], config.lstm, batch_first=True)
        self.backwards = nn.LSTM(embeddings.shape[1], config.lstm, batch_first=True)
        self.out = nn.Linear(2 * config.lstm, config.width)
        self.states = nn.Linear(states, config.width, bias=False) if states else None
        if self.states is not None:
            nn.init.zeros_(self.states.weight)

    def forward(self, condition: Condition, states: Tensor | None = None) -> Tensor:
        last = (condition.lengths - 1)[:, None]  # (edits, 1)
        positions = torch.arange(condition.ids.shape[1], device=last.device)[None]  # (1, tokens)
        tokens = self.embedding(condition.ids)  # (edits, tokens, width)
        backwards = tokens.take_along_dim((last - positions).clamp(min=0)[:, :, None], dim=1)
        ends = [
            lstm(read)[0].take_along_dim(last[:, :, None], dim=1).squeeze(1)  # (edits, lstm)
            for lstm, read in ((self.forwards, tokens), (self.backwards, backwards))
        ]
        h = self.out(torch.cat(ends, dim=-1))
        return (h if self.states is None else h + self.states(states)).tanh()


def read_states(traces: Sequence[Trace]) -> Tensor:
    """Averages each layer's inputs over tokens, weighted by the norms of their gradients: (edits, sum of widths).

    This leaves out padding, whose gradients are zero. Each layer's average is normalised.
    """
    states = []
    for trace in traces:
        weights = trace.D.float().norm(dim=-1, keepdim=True)  # (edits, tokens, 1)
        mean = (weights * trace.X.float()).sum(1) / weights.sum(1).clamp(min=1e-30)
        states.append(F.layer_norm(mean, mean.shape[-1:]))
    return torch.cat(states, dim=-1)


def reduced(embeddings: Tensor, width: int) -> Tensor:
    """Projects embeddings onto their `width` directions of largest variance, unless they are no wider than that.

    The embeddings of a decoder can have more parameters than the rest of its editor.
    """
    if embeddings.shape[1] <= width:
        return embeddings
    centred = embeddings - embeddings.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # in the order of increasing variance
    return centred @ directions[:, -width:]


@dataclass(frozen=True)
class Gates:
    """The hyper-network's outputs for all weights of one shape: s·r, c, s·r' and c'."""

    gradient_out: Tensor  # s·r   (weights, edits, out)
    gradient_in: Tensor  # c     (weights, edits, in)
    bias_out: Tensor  # s·r'  (weights, edits, out)
    bias_in: Tensor  # c'    (weights, edits, in)

    def factors(self, indices: list[int], traces: Sequence[Trace], gradients: bool) -> list[LowRank]:
        """Returns A = [X ⊙ c ; c'] and B = s · [D ⊙ r ; r'] of the weights with these indices, in the model's dtype.

        The traces of these weights have equal shapes. Without `gradients`, A = c' and B = s · r'.
        """
        vectors = (self.gradient_in, self.bias_in, self.gradient_out, self.bias_out)
        X, D = [trace.X for trace in traces], [trace.D for trace in traces]
        c, A, r, B = (
            _select(v, indices).unsqueeze(2).to(X[0].dtype) for v in vectors
        )  # (weights, edits, 1, in or out)
        if gradients:
            A, B = _with_tokens(torch.stack(X) * c, A), _with_tokens(torch.stack(D) * r, B)
        return list(map(LowRank, A, B))


def _select(vectors: Tensor, indices: list[int]) -> Tensor:
    """Selects weights without an index tensor, which would have to be copied to the device each time."""
    parts = vectors.unbind(0)
    return vectors if len(indices) == len(parts) else torch.stack([parts[i] for i in indices])


def _with_tokens(tokens: Tensor, last: Tensor) -> Tensor:
    """Concatenates the rows of the tokens and the last row, with zero rows between them to get an aligned rank."""
    rank = tokens.shape[2] + 1
    return torch.cat([tokens, F.pad(last, (0, 0, aligned(rank, last) - rank, 0))], dim=2)


class WeightGroup(nn.Module):
    """The networks of all weights of one shape, as batched products: Linear, tanh, Linear."""

    def __init__(self, weights: int, out: int, in_: int, config: EditorConfig):
        super().__init__()
        self.split = (out, in_, out, in_, 1)
        self.max_scale = config.max_scale
        self.down = WeightNormLinears(weights, config.width, config.bottleneck)
        self.up = WeightNormLinears(weights, config.bottleneck, sum(self.split))

    def forward(self, h: Tensor) -> Gates:
        predicted = self.up(self.down(h.expand(self.down.count, *h.shape)).tanh())  # (weights, edits, 2(out + in) + 1)
        r, a, r_bias, a_bias, eta = predicted.split(self.split, dim=-1)
        s = self.max_scale * eta.sigmoid()
        return Gates(s * r.softmax(-1), a, s * r_bias.softmax(-1), a_bias)


class WeightNormLinears(nn.Module):
    """Several weight-normed linear layers of one shape: y = g · (v x) / ‖v‖ + b, each row of v with its own norm.

    Scaling the product instead of the weight gives the same result without storing the normed weight.
    """

    def __init__(self, count: int, in_: int, out: int):
        super().__init__()
        self.count = count
        bound = in_**-0.5  # as in nn.Linear
        self.v = nn.Parameter(torch.empty(count, out, in_).uniform_(-bound, bound))
        self.g = nn.Parameter(self.v.detach().norm(dim=-1))
        self.b = nn.Parameter(torch.empty(count, out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.g / self.v.norm(dim=-1)  # (count, out)
        return torch.bmm(x, self.v.mT) * scale[:, None] + self.b[:, None]  # (count, edits, out)
