"""The best answers to each input with their probabilities, from the unpatched model or under the input's own patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention
from factpatch.engine import edited
from factpatch.models.base import PATCHES_PER_BATCH, TaskModel
from factpatch.models.rows import in_batches
from factpatch.patch import Patch, stack_patches


@dataclass(frozen=True)
class Answer:
    """One possible answer and the probability that the model gives it."""

    text: str
    probability: float


def best_answers(model: TaskModel, inputs: Sequence[str], count: int = 5) -> list[list[Answer]]:
    """Returns the `count` best answers to each input, best first."""
    batches = in_batches(inputs, PATCHES_PER_BATCH)
    with model.lock:
        return [answers for batch in batches for answers in _ranked(model, batch, count, edits=1)]


def best_answers_patched(
    model: TaskModel, patches: Sequence[Patch], inputs: Sequence[str], count: int = 5
) -> list[list[Answer]]:
    """Returns the `count` best answers to each input under that input's own patch. The weights are not changed."""
    answers: list[list[Answer]] = []
    for batch in in_batches(list(zip(patches, inputs, strict=True)), PATCHES_PER_BATCH):
        with model.lock, edited(model.layers, stack_patches([patch for patch, _ in batch], model.layers)):
            answers += _ranked(model, [text for _, text in batch], count, edits=len(batch))
    return answers


@torch.no_grad()
@no_cudnn_attention()
def _ranked(model: TaskModel, inputs: Sequence[str], count: int, edits: int) -> list[list[Answer]]:
    decided = model.decide_scored(model.collate(model.encode_checked(inputs)), count, edits)
    log_p = [_by_text(ranked) for ranked in decided]
    _fill_in(model, inputs, log_p)
    return [[Answer(text, math.exp(value or 0.0)) for text, value in by_text.items()] for by_text in log_p]


def _by_text(ranked: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """Returns the log-probability of each distinct text, best first: different beams can decode to the same text."""
    best: dict[str, float | None] = {}
    for text, value in ranked:
        best[text] = value if best.get(text) is None else best[text]
    return best


def _fill_in(model: TaskModel, inputs: Sequence[str], log_p: Sequence[dict[str, float | None]]) -> None:
    """Computes the log-probabilities that the search did not compute, in one forward pass."""
    unknown = [[text for text, value in by_text.items() if value is None] for by_text in log_p]
    if not (most := max(map(len, unknown))):
        return
    # Each edit needs the same number of rows, so the best answer fills up shorter lists and is computed again.
    texts = [(missing + [next(iter(known))] * most)[:most] for missing, known in zip(unknown, log_p, strict=True)]
    pairs = [(x, text) for x, answers in zip(inputs, texts, strict=True) for text in answers]
    rows = model.rows([x for x, _ in pairs], [text for _, text in pairs]).at_targets()
    losses = F.cross_entropy(model.scores(model.features(rows)), rows.target_labels, reduction="none")  # (positions,)
    values = iter(rows.sums(-losses).tolist())
    for by_text, answers in zip(log_p, texts, strict=True):
        by_text.update((text, next(values)) for text in answers)
