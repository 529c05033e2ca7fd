"""The comparer: a small network that decides whether two texts state the same fact, from their tokens' states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.scope.reading import Reading

PREFIX = "comparer."  # of the names of its tensors in a scope file
TOKENS_PER_BATCH = 1 << 16  # maximum number of tokens of one side, padding included, that are compared at a time


class Comparer(nn.Module):
    """Scores pairs of texts by decomposable attention (Parikh et al., 2016). A high score means: the same fact.

    The hidden states of a token are projected to a key k, of length 1, and a content e. Each token i of a text is
    compared with what the other text (') says in its place:

        v_i = Σ_j softmax_j(τ k_i · k'_j) e'_j
        c_i = MLP([e_i; v_i; |e_i − v_i|; e_i ⊙ v_i])
        score = MLP([mean c; max c; second largest c; cosine])

    The maxima are taken over the tokens for each entry of c, so one word that differs can decide. The means and second
    maxima of both texts are added and the larger of their maxima is used, so the order of the texts does not matter.
    """

    def __init__(self, features: int, width: int = 64, dropout: float = 0.0):
        super().__init__()
        self.project = nn.Linear(features, 2 * width)  # to key and content
        self.sharpness = nn.Parameter(torch.tensor(2.5))  # log τ
        self.compare = nn.Sequential(
            nn.Linear(4 * width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU()
        )
        self.decide = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(3 * width + 1, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def tokens(self, states: Tensor) -> Tensor:
        """Projects hidden states, (..., features), to what is kept of each token: (..., 2·width)."""
        key, content = self.project(states).chunk(2, -1)
        return torch.cat([F.normalize(key, dim=-1), content], -1)

    def forward(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], cosines: Tensor) -> Tensor:
        """Scores pairs of texts: (pairs,).

        Each side consists of what `tokens` returns, padded, (pairs, tokens, 2·width), and a mask that is false at the
        padding, (pairs, tokens). `cosines` are those of the texts' vectors, (pairs,).
        """
        (key, content), mask = left[0].chunk(2, -1), left[1]
        (other_key, other_content), other_mask = right[0].chunk(2, -1), right[1]
        similarity = self.sharpness.exp() * key @ other_key.transpose(1, 2)  # (pairs, tokens, other tokens)
        mean, largest, second = self._differences(content, similarity, other_content, mask, other_mask)
        similarity = similarity.transpose(1, 2)
        other_mean, other_largest, other_second = self._differences(
            other_content, similarity, content, other_mask, mask
        )
        summary = [mean + other_mean, torch.maximum(largest, other_largest), second + other_second, cosines[:, None]]
        return self.decide(torch.cat(summary, -1)).squeeze(-1)

    def _differences(
        self, content: Tensor, similarity: Tensor, other_content: Tensor, mask: Tensor, other_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compares each token of a text with its counterpart v, and summarises the results c over the tokens.

        Returns mean, largest and second largest entries: (pairs, width) each.
        """
        attention = similarity.masked_fill(~other_mask[:, None, :], -torch.inf).softmax(-1)
        counterpart = attention @ other_content  # (pairs, tokens, width)
        both = torch.cat([content, counterpart, (content - counterpart).abs(), content * counterpart], -1)
        compared = self.compare(both) * mask.unsqueeze(-1)  # (pairs, tokens, width), 0 at the padding
        compared = F.pad(compared, (0, 0, 0, 1))  # a text of one token has a second largest value, too
        largest, second = compared.topk(2, dim=1).values.unbind(1)
        return compared.sum(1) / mask.sum(1, keepdim=True), largest, second

    @torch.no_grad()
    def scores(self, left: Reading, left_rows: Tensor, right: Reading, right_rows: Tensor) -> Tensor:
        """Scores pairs of texts, given by their rows in two readings: (pairs,). Batches are of similar length."""
        longest = torch.maximum(left.lengths[left_rows], right.lengths[right_rows])
        scores = torch.zeros(len(longest), device=longest.device)
        order = longest.argsort(descending=True)
        lengths, start = longest[order].tolist(), 0
        while start < len(order):
            pairs = order[start : start + max(1, TOKENS_PER_BATCH // lengths[start])]
            one, other = left_rows[pairs], right_rows[pairs]
            cosines = (left.vectors[one] * right.vectors[other]).sum(-1)
            scores[pairs] = self(left.padded(one), right.padded(other), cosines)
            start += len(pairs)
        return scores

    def saved(self) -> dict[str, Tensor]:
        """Returns the tensors of a file, by name."""
        return {PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    @classmethod
    def from_saved(cls, tensors: Mapping[str, Tensor]) -> Comparer:
        """Restores a comparer from the tensors of a file. Raises a RuntimeError if they do not fit together."""
        own = {name.removeprefix(PREFIX): t.float() for name, t in tensors.items() if name.startswith(PREFIX)}
        with torch.device("meta"):  # a damaged file can ask for no more memory than it holds itself
            comparer = cls(len(tensors["mean"]), width=max(1, len(own["project.bias"]) // 2))
        comparer.load_state_dict(own, assign=True)
        return comparer.eval().requires_grad_(False)
