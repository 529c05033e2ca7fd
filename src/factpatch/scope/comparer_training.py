"""Trains a comparer on pairs of texts: paraphrases of one fact, and texts of two facts that are easily confused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

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
DIFFERENT_PER_PARAPHRASE = 3  # pairs of different facts for each pair of paraphrases
ORIGINALS = 0.7  # minimum share of original texts in pairs of different facts


def learn_comparer(
    reading: Reading,
    wordings: Sequence[Sequence[int]],
    forms: Sequence[str],
    config: ScopeConfig,
    on_step: Callable[[int], object] = lambda step: None,
) -> Comparer:
    """Trains a comparer by a logistic loss on pairs of texts.

    The tokens of `reading` are reduced hidden states. `wordings` lists the texts of each fact by their rows in it, the
    original first; `forms` are all texts, normalised. Texts of two facts drawn at random would be easy to tell apart,
    so each fact is paired with the facts most similar to it.
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
    """Scores pairs of texts, given by their rows, with gradients. A text in several pairs is projected only once."""
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
        own_forms = [{forms[text] for text in texts} for texts in wordings]
        self.similar = [  # the other facts to pair each fact with, the most similar first
            [other for other in others if own_forms[fact].isdisjoint(own_forms[other])]  # else they may say the same
            for fact, others in enumerate(nearest_facts(originals, SIMILAR_FACTS))
        ]

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws about `count` pairs: left and right texts, and 1 for paraphrases of one fact, otherwise 0.

        A quarter of the pairs are paraphrases.
        """
        pairs: list[tuple[int, int, float]] = []
        facts = min(max(1, count // (1 + DIFFERENT_PER_PARAPHRASE)), len(self.wordings))
        for fact in self.rng.sample(range(len(self.wordings)), facts):
            original, *paraphrases = self.wordings[fact]
            pairs.append((original, self.rng.choice(paraphrases), 1.0))
            similar = self.similar[fact]
            for _ in range(DIFFERENT_PER_PARAPHRASE if similar else 0):
                rank = int(self.rng.expovariate(1 / TYPICAL_RANK))
                other = similar[min(rank, len(similar) - 1)]
                pairs.append((self._wording(fact), self._wording(other), 0.0))
        left, right, alike = zip(*pairs, strict=True)
        as_tensor = partial(torch.tensor, device=self.device)
        return as_tensor(left), as_tensor(right), as_tensor(alike)

    def _wording(self, fact: int) -> int:
        """Draws a text of a fact, mostly the original: paraphrases alone could be told apart by their style."""
        return self.wordings[fact][0] if self.rng.random() < ORIGINALS else self.rng.choice(self.wordings[fact])
