"""Learns everything that a scope needs from facts with paraphrases, except for the threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.facts import normalize
from factpatch.models import TaskModel
from factpatch.scope.comparer_training import learn_comparer
from factpatch.scope.features import States, text_states
from factpatch.scope.matching import Matcher
from factpatch.scope.reading import Reading, collect
from factpatch.scope.reduction import SAMPLE_TOKENS, Reduction
from factpatch.scope.training import ScopeConfig, learn_projection

Report = Callable[[str, float], object]  # called with the stage of training and its progress from 0 to 1
RARE = 0.001  # share of training paraphrases that may be below the floor
NEW_TEXTS = 2 / 3  # factor of the floor, as new paraphrases have lower cosines than those the projection learned from
TOKENS_PER_TEXT = 8  # low estimate


@dataclass(frozen=True)
class Learned:
    """The parts of a scope that `learn` returns, named as in `Scope`."""

    mean: Tensor  # (features,)
    scale: Tensor  # (features,)
    projection: Tensor  # (dimensions, features)
    matcher: Matcher


def learn(
    model: TaskModel, texts: Sequence[Sequence[str]], layers: Sequence[int], config: ScopeConfig, report: Report
) -> Learned:
    """Learns the projection and then the comparer. `texts` holds the wordings of each fact, the original first."""
    flat = [text for group in texts for text in group]
    ends = torch.tensor([len(group) for group in texts]).cumsum(0).tolist()
    wordings = [range(end - len(group), end) for end, group in zip(ends, texts, strict=True)]
    sample = flat[:: max(1, len(flat) // (SAMPLE_TOKENS // TOKENS_PER_TEXT))]  # evenly spaced
    reduction = Reduction.fit(
        torch.cat([states.tokens() for states in text_states(model, sample, layers)]), config.seed
    )
    reading = collect(
        _reported(text_states(model, flat, layers), len(flat), report),
        lambda states: (states.pooled(), reduction(states.tokens())),
    )
    mean, scale = reading.vectors.mean(0), reading.vectors.std(0).clamp_min(1e-6)
    features = (reading.vectors - mean) / scale
    projection = learn_projection(
        features, wordings, config, lambda step: report("training the projection", (step + 1) / config.steps)
    )
    if not config.compare:
        return Learned(mean, scale, projection, Matcher())
    reading = replace(reading, vectors=F.normalize(features @ projection.T, dim=-1))
    comparer = learn_comparer(
        reading,
        wordings,
        [normalize(text) for text in flat],
        config,
        lambda step: report("training the comparer", (step + 1) / config.compare_steps),
    )
    return Learned(mean, scale, projection, Matcher(reduction.folded_into(comparer), _floor(reading, wordings)))


def _floor(reading: Reading, wordings: Sequence[range]) -> float:
    """Returns a cosine that nearly all paraphrases, new ones too, reach with the original text of their fact."""
    originals = torch.tensor([texts[0] for texts in wordings for _ in texts[1:]], device=reading.vectors.device)
    paraphrases = torch.tensor([text for texts in wordings for text in texts[1:]], device=reading.vectors.device)
    cosines = (reading.vectors[originals] * reading.vectors[paraphrases]).sum(-1).sort().values
    lowest = float(cosines[int(RARE * len(cosines))])
    return min(lowest, NEW_TEXTS * lowest)  # a negative cosine would be raised by the factor


def _reported(batches: Iterator[States], count: int, report: Report) -> Iterator[States]:
    done = 0
    for states in batches:
        yield states
        done += len(states.numbers)
        report("reading texts", done / count)
