"""Learns a projection in which paraphrases of one fact are close together and different facts far apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.errors import InputError

FALSE_MATCHES = 0.005  # share of other inputs that may match an active fact, unless another one is given


@dataclass(frozen=True)
class ScopeConfig:
    """Settings of a scope's training."""

    dimensions: int = 256  # of the projection
    compare: bool = True  # whether to train a comparer, too
    steps: int = 1500  # of training the projection; the comparer takes `compare_steps`
    seeds_per_step: int = 48  # facts drawn at random, each together with `neighbours` of its nearest facts
    neighbours: int = 5
    learning_rate: float = 1e-3
    paraphrases: int = 3  # per fact, of each kind
    facts: int = 20_000  # maximum number to train on
    same_subject: float = 0.5  # made-up questions about the subjects of facts to train on, per fact
    held_out: int = 1024  # maximum number of held-out facts, on which the threshold is chosen
    false_matches: float = FALSE_MATCHES  # share of other inputs that may match an active fact
    seed: int = 0

    @property
    def compare_steps(self) -> int:
        """Training steps of the comparer."""
        return 2 * self.steps

    def __post_init__(self) -> None:
        for name in ("dimensions", "steps", "seeds_per_step", "neighbours", "paraphrases", "facts", "held_out"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.same_subject <= 1:
            raise InputError(f"same_subject must be from 0 to 1, found {self.same_subject}")
        if not 0 <= self.false_matches < 1:
            raise InputError(f"false_matches must be at least 0 and below 1, found {self.false_matches}")


def learn_projection(
    features: Tensor,
    wordings: Sequence[Sequence[int]],
    config: ScopeConfig,
    on_step: Callable[[int], object] = lambda step: None,
) -> Tensor:
    """Learns a linear map of standardised features, (dimensions, features), whose cosines distinguish facts.

    `wordings` lists, for each fact, the rows of `features` that belong to it. Every step draws two wordings of each
    of several similar facts, and scores all pairs with a logistic loss (SigLIP; Zhai et al., 2023). Unlike a softmax
    over the batch, that loss favours one threshold for all facts.
    """
    rng = random.Random(config.seed)
    projection = nn.Linear(features.shape[1], config.dimensions, bias=False)
    generator = torch.Generator().manual_seed(config.seed)
    nn.init.orthogonal_(projection.weight, generator=generator)
    projection.to(features.device)
    log_scale = nn.Parameter(torch.tensor(3.0, device=features.device))
    bias = nn.Parameter(torch.tensor(-10.0, device=features.device))
    optimizer = torch.optim.Adam(
        [{"params": projection.parameters(), "lr": config.learning_rate}, {"params": [log_scale, bias], "lr": 1e-2}]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.steps)
    first = torch.tensor([rows[0] for rows in wordings])
    nearest: list[list[int]] = []
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(config.steps):
            if step % 100 == 0:
                nearest = nearest_facts(F.normalize(projection(features[first]).detach(), dim=-1), 12)
            left, right = _draw(wordings, nearest, config, rng)
            one, other = (F.normalize(projection(features[rows]), dim=-1) for rows in (left, right))
            cosines = one @ other.T
            logits = log_scale.exp() * cosines + bias  # (facts, facts), own wordings on the diagonal
            signs = 2 * torch.eye(len(left), device=logits.device) - 1
            loss = -F.logsigmoid(signs * logits).sum() / len(left)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            on_step(step)
    return projection.weight.detach()


def nearest_facts(vectors: Tensor, count: int) -> list[list[int]]:
    """Returns the indices of the facts most similar to each fact, by cosine. Works in slices to bound memory."""
    nearest: list[list[int]] = []
    count = min(count, len(vectors) - 1)
    for start in range(0, len(vectors), 1024):
        cosines = vectors[start : start + 1024] @ vectors.T
        cosines.diagonal(start).fill_(-2)
        nearest += cosines.topk(count, dim=1).indices.tolist()
    return nearest


def _draw(
    wordings: Sequence[Sequence[int]], nearest: Sequence[Sequence[int]], config: ScopeConfig, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Draws two wordings of each of some facts and of their nearest facts."""
    seeds = rng.sample(range(len(wordings)), min(config.seeds_per_step, len(wordings)))
    drawn = dict.fromkeys(seeds)
    for fact in seeds:
        drawn.update(dict.fromkeys(rng.sample(nearest[fact], min(config.neighbours, len(nearest[fact])))))
    pairs = [rng.sample(list(wordings[fact]), 2) for fact in drawn]
    return [one for one, _ in pairs], [other for _, other in pairs]
