"""The best answers to each input with their probabilities, unpatched or under a patch of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention
from factpatch.engine import edited
from factpatch.models.base import PATCHES_PER_BATCH, TaskModel
from factpatch.patch import Patch, stack_patches


@dataclass(frozen=True)
class Answer:
    """One possible answer and the probability that the model gives it."""

    text: str
    probability: float


def best_answers(model: TaskModel, inputs: Sequence[str], count: int = 5) -> list[list[Answer]]:
    """The `count` best answers to each input, best first."""
    parts = [inputs[start : start + PATCHES_PER_BATCH] for start in range(0, len(inputs), PATCHES_PER_BATCH)]
    with model.lock:
        return [answers for part in parts for answers in _ranked(model, part, count, edits=1)]


def best_answers_patched(
    model: TaskModel, patches: Sequence[Patch], inputs: Sequence[str], count: int = 5
) -> list[list[Answer]]:
    """The `count` best answers to each input under that input's own patch. The weights are not changed."""
    found: list[list[Answer]] = []
    for start in range(0, len(inputs), PATCHES_PER_BATCH):
        part = slice(start, start + PATCHES_PER_BATCH)
        with model.lock, edited(model.layers, stack_patches(patches[part], model.layers)):
            found += _ranked(model, inputs[part], count, edits=len(inputs[part]))
    return found


@torch.no_grad()
@no_cudnn_attention()
def _ranked(model: TaskModel, inputs: Sequence[str], count: int, edits: int) -> list[list[Answer]]:
    for text in inputs:
        model.check_input(text)
    ranked = model.decide(model.rows(inputs), count, edits)
    most = max(map(len, ranked), default=0)
    texts = [(found + found[:1] * most)[:most] for found in ranked]  # as many rows for each edit
    pairs = [(x, text) for x, found in zip(inputs, texts, strict=True) for text in found]
    probabilities = iter(_probabilities(model, [x for x, _ in pairs], [text for _, text in pairs]))
    answers = [[Answer(text, next(probabilities)) for text in found] for found in texts]
    return [_different(found) for found in answers]


def _probabilities(model: TaskModel, inputs: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The probability of each answer to the input at the same place: the product over its tokens."""
    rows = model.rows(inputs, answers).at_targets()
    losses = F.cross_entropy(model.scores(model.features(rows)), rows.target_labels, reduction="none")  # (positions,)
    return losses.new_zeros(len(rows)).index_add(0, rows.row_of_position, -losses).exp().tolist()


def _different(answers: list[Answer]) -> list[Answer]:
    """Leaves out repeated texts: beams can differ in tokens that are not part of the text."""
    found: dict[str, Answer] = {}
    for answer in answers:
        found.setdefault(answer.text, answer)
    return list(found.values())
