"""A scope's record of a text: one vector to find similar facts, and a short vector per token to compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factpatch.scope.features import States


@dataclass(frozen=True)
class Reading:
    """A scope's record of several texts. The tokens of all texts are stored one after the other, without padding."""

    vectors: Tensor  # (texts, dimensions), of length 1
    tokens: Tensor  # (all tokens, width); a scope without a comparer needs none and keeps width 0
    starts: Tensor  # (texts,) where the tokens of each text begin
    lengths: Tensor  # (texts,) the number of tokens of each text

    def __len__(self) -> int:
        return len(self.vectors)

    def part(self, numbers: Sequence[int] | slice) -> Reading:
        """Returns the reading of some of the texts. The tokens are shared, not copied."""
        return Reading(self.vectors[numbers], self.tokens, self.starts[numbers], self.lengths[numbers])

    def padded(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens of these texts, (texts, tokens, width), and a mask that is false at the padding."""
        lengths = self.lengths[numbers]
        positions = torch.arange(int(lengths.max()), device=lengths.device)  # (tokens,)
        mask = positions < lengths[:, None]  # (texts, tokens)
        # The padding repeats the first token of the text, so that every index exists.
        return self.tokens[self.starts[numbers][:, None] + positions * mask].float(), mask


def collect(batches: Iterable[States], represent: Callable[[States], tuple[Tensor, Tensor]]) -> Reading:
    """Puts batches of texts into one reading, in the order of the texts' numbers.

    `represent` turns the hidden states of a batch into vectors, (rows, dimensions), and tokens, (tokens, width). The
    tokens are kept in half precision.
    """
    vectors: list[Tensor] = []
    tokens: list[Tensor] = []
    batch_lengths: list[Tensor] = []
    numbers: list[int] = []  # of the texts in the order in which they are read, which is that of their lengths
    for states in batches:
        own_vectors, own_tokens = represent(states)
        vectors.append(own_vectors)
        tokens.append(own_tokens.half())
        batch_lengths.append(states.mask.sum(1))
        numbers += states.numbers
    if not numbers:
        none = torch.zeros(0, dtype=torch.long)
        return Reading(torch.zeros(0, 0), torch.zeros(0, 0), none, none)
    lengths = torch.cat(batch_lengths)
    starts = lengths.cumsum(0) - lengths
    order = torch.tensor(numbers, device=lengths.device).argsort()  # back to the order of the texts
    return Reading(torch.cat(vectors)[order], torch.cat(tokens), starts[order], lengths[order])
