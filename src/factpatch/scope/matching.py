"""Finds the fact that each text is most probably about, and the threshold from which on it counts as a match."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from factpatch.errors import InputError
from factpatch.scope.comparer import Comparer
from factpatch.scope.reading import Reading

QUERIES_PER_BATCH = 4096  # number of texts that are compared with all facts at a time
CANDIDATES = 8  # maximum number of wordings of facts that the comparer scores for each text
NO_CANDIDATE = -100.0  # below every cosine and every score that a comparer can be expected to give
LOWEST_THRESHOLD = -3.0  # a comparer's score is a log-odds; texts at odds of 1 : 20 are not taken for the same fact


@dataclass(frozen=True)
class Calibration:
    """A threshold, and the error rates on the data that it was chosen on."""

    threshold: float  # smallest score at which an input counts as being about a fact
    recall: float | None  # share of paraphrases matched to their own fact; None without paraphrases
    false_matches: float  # share of inputs matched to a fact that is not their own
    facts: int  # number of facts that were active


@dataclass(frozen=True)
class KnownFacts:
    """Texts whose facts are known, to choose a threshold on."""

    inputs: Reading  # of all facts, and others; each is an example of an input that is about none of the other facts
    active: int  # number of active facts, the first of `inputs`
    paraphrases: Reading  # of the active facts
    owners: Tensor  # (paraphrases,) the active fact of each


@dataclass(frozen=True)
class Matcher:
    """Scores texts against facts: by their cosine or, with a comparer, by comparing them with the nearest facts."""

    comparer: Comparer | None = None
    floor: float = -1.0  # smallest cosine at which the comparer looks at a fact

    def best(self, texts: Reading, anchors: Reading, besides_own: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the highest score of each text with any anchor, and the row of that anchor: (texts,) each.

        Anchors are the wordings of the active facts. With `besides_own`, they must be the first of the texts
        themselves, and no text is compared with itself.
        """
        scores, numbers = [], []
        for start in range(0, len(texts), QUERIES_PER_BATCH):
            part = texts.part(slice(start, start + QUERIES_PER_BATCH))
            cosines = part.vectors @ anchors.vectors.T  # (texts, anchors)
            if besides_own and start < len(anchors):
                cosines.diagonal(start).fill_(NO_CANDIDATE)
            nearest = cosines.topk(1 if self.comparer is None else min(CANDIDATES, len(anchors)), dim=1)
            compared = nearest.values if self.comparer is None else self._compared(part, anchors, *nearest)
            best = compared.max(1)  # (texts, candidates) to (texts,)
            scores.append(best.values)
            numbers.append(nearest.indices.gather(1, best.indices[:, None]).squeeze(1))
        return torch.cat(scores), torch.cat(numbers)

    def _compared(self, texts: Reading, anchors: Reading, cosines: Tensor, candidates: Tensor) -> Tensor:
        """Returns the comparer's scores of the candidates whose cosine reaches the floor: (texts, candidates)."""
        assert self.comparer is not None
        rows, columns = (cosines >= self.floor).nonzero(as_tuple=True)
        scores = torch.full_like(cosines, NO_CANDIDATE)
        scores[rows, columns] = self.comparer.scores(texts, rows, anchors, candidates[rows, columns])
        return scores

    def calibrate(self, facts: KnownFacts, false_matches: float) -> Calibration:
        """Finds the lowest threshold at which at most this share of inputs matches a fact that is not their own."""
        active = facts.inputs.part(slice(facts.active))
        nearest, _ = self.best(facts.inputs, active, besides_own=True)
        threshold = threshold_for(nearest, false_matches)
        wrong = float((nearest >= threshold).float().mean())
        recall = None
        if len(facts.paraphrases):
            scores, found = self.best(facts.paraphrases, active)
            recall = float(((found == facts.owners) & (scores >= threshold)).float().mean())
        return Calibration(threshold, recall, wrong, len(active))


def threshold_for(scores: Tensor, false_matches: float) -> float:
    """Returns the lowest threshold that at most the given share of these scores reaches."""
    if not 0 <= false_matches < 1:
        raise InputError(f"expected a share of false matches from 0 to below 1, found {false_matches}")
    allowed = int(false_matches * len(scores))
    above = float(scores.sort(descending=True).values[allowed]) + 1e-4  # just above the first score beyond that share
    return max(above, LOWEST_THRESHOLD)
