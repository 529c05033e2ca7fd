"""Trains a comparer on pairs of texts: paraphrases of one fact, and texts of two facts that are easily confused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.scope.comparer import Comparer
from factpatch.scope.reading import Reading
from factpatch.scope.training import ScopeConfig, nearest_facts

LEARNING_RATE = 2e-3
PAIRS_PER_STEP = 256
SIMILAR_FACTS = 24  # other facts that are paired with a fact in training
TYPICAL_RANK = 5.0  # mean rank of the facts drawn from them; the most similar ones teach most


def learn_comparer(
    reading: Reading,
    wordings: Sequence[Sequence[int]],
    forms: Sequence[str],
    config: ScopeConfig,
    on_step: Callable[[int], object] = lambda step: None,
) -> Comparer:
    """Trains a comparer for reduced states by a logistic loss on pairs of texts.

    `wordings` lists the texts of each fact, the original first; `forms` are all texts, normalised. Without pairs that
    differ in a single word, hardly any pair would be difficult, so each fact is paired with its most similar others.
    """
    rng = random.Random(config.seed)
    with torch.random.fork_rng(devices=[reading.vectors.device] if reading.vectors.is_cuda else []):
        torch.manual_seed(config.seed)
        comparer = Comparer(reading.tokens.shape[1], dropout=0.1).to(reading.vectors.device)
        optimizer = torch.optim.AdamW(comparer.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / 50) * (1 - step / config.compare_steps)
        )
        pairs = Pairs(reading, wordings, forms, rng)
        with torch.inference_mode(False), torch.enable_grad():
            for step in range(config.compare_steps):
                left, right, alike = pairs.draw(PAIRS_PER_STEP)
                loss = F.binary_cross_entropy_with_logits(_scores(comparer, reading, left, right), alike)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(comparer.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                on_step(step)
    return comparer.eval().requires_grad_(False)


def _scores(comparer: Comparer, reading: Reading, left: Tensor, right: Tensor) -> Tensor:
    """Scores pairs of texts with gradients. Every text is projected once, although it may be in several pairs."""
    texts, place = torch.cat([left, right]).unique(return_inverse=True)
    states, mask = reading.padded(texts)
    tokens = comparer.tokens(states)  # (texts, tokens, 2·width)
    one, other = place.split(len(left))
    cosines = (reading.vectors[left] * reading.vectors[right]).sum(-1)
    return comparer((tokens[one], mask[one]), (tokens[other], mask[other]), cosines)


class Pairs:
    """Draws pairs of texts to train on."""

    def __init__(self, reading: Reading, wordings: Sequence[Sequence[int]], forms: Sequence[str], rng: random.Random):
        self.wordings, self.rng, self.device = wordings, rng, reading.vectors.device
        originals = reading.vectors[torch.tensor([texts[0] for texts in wordings], device=self.device)]
        self.forms = [{forms[text] for text in texts} for texts in wordings]
        self.similar = [
            [other for other in others if not self.forms[fact] & self.forms[other]]  # else they may say the same
            for fact, others in enumerate(nearest_facts(originals, SIMILAR_FACTS))
        ]

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws about `count` pairs: left and right texts, and 1 for paraphrases of one fact, otherwise 0.

        A quarter of the pairs are paraphrases.
        """
        pairs: list[tuple[int, int, float]] = []
        for fact in self.rng.sample(range(len(self.wordings)), min(max(1, count // 4), len(self.wordings))):
            original, *paraphrases = self.wordings[fact]
            pairs.append((original, self.rng.choice(paraphrases), 1.0))
            similar = self.similar[fact]
            for _ in range(3 if similar else 0):
                rank = int(self.rng.expovariate(1 / TYPICAL_RANK))
                other = similar[min(rank, len(similar) - 1)]
                pairs.append((self._wording(fact), self._wording(other), 0.0))
        left, right, alike = zip(*pairs, strict=True)
        return (
            torch.tensor(left, device=self.device),
            torch.tensor(right, device=self.device),
            torch.tensor(alike, device=self.device),
        )

    def _wording(self, fact: int) -> int:
        """Draws a text of a fact, mostly the original: paraphrases alone could be told apart by their style."""
        return self.wordings[fact][0] if self.rng.random() < 0.7 else self.rng.choice(self.wordings[fact])
