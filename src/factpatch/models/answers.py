"""The best answers to each input with their probabilities, unpatched or under a patch of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from factpatch.backends import no_cudnn_attention
from factpatch.engine import edited
from factpatch.models.base import PATCHES_PER_BATCH, TaskModel
from factpatch.models.rows import NO_TARGET
from factpatch.patch import Patch, stack_patches


@dataclass(frozen=True)
class Answer:
    """One possible answer and the probability that the model gives it."""

    text: str
    probability: float


def best_answers(model: TaskModel, inputs: Sequence[str], count: int = 5) -> list[list[Answer]]:
    """The `count` best answers to each input, best first."""
    parts = [inputs[start : start + PATCHES_PER_BATCH] for start in range(0, len(inputs), PATCHES_PER_BATCH)]
    return [answers for part in parts for answers in _ranked(model, part, count, edits=1)]


def best_answers_patched(
    model: TaskModel, patches: Sequence[Patch], inputs: Sequence[str], count: int = 5
) -> list[list[Answer]]:
    """The `count` best answers to each input under that input's own patch. The weights are not changed."""
    found: list[list[Answer]] = []
    for start in range(0, len(inputs), PATCHES_PER_BATCH):
        part = slice(start, start + PATCHES_PER_BATCH)
        with edited(model.layers, stack_patches(patches[part], model.layers)):
            found += _ranked(model, inputs[part], count, edits=len(inputs[part]))
    return found


@torch.no_grad()
@no_cudnn_attention()
def _ranked(model: TaskModel, inputs: Sequence[str], count: int, edits: int) -> list[list[Answer]]:
    for text in inputs:
        model.check_input(text)
    ranked = model.decide(model.rows(inputs), count, edits)
    pairs = [(x, text) for x, texts in zip(inputs, ranked, strict=True) for text in texts]  # still edit-major
    rows = model.rows([x for x, _ in pairs], [text for _, text in pairs])
    assert rows.labels is not None
    tokens = 1 if rows.labels.dim() == 1 else (rows.labels != NO_TARGET).sum(-1)
    probabilities = iter((-model.losses(rows) * tokens).exp().tolist())  # losses are means over tokens
    answers = [[Answer(text, next(probabilities)) for text in texts] for texts in ranked]
    return [_different(found) for found in answers]


def _different(answers: list[Answer]) -> list[Answer]:
    """Leaves out repeated texts: beams can differ in tokens that are not part of the text."""
    return list({answer.text: answer for answer in reversed(answers)}.values())[::-1]
