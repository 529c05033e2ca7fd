"""Repeated updates: an edit that does not succeed is updated again on the updated model (De Cao et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from factpatch.deltas import add, scaled
from factpatch.editors.base import EditMethod
from factpatch.editors.trainable import TrainableEditor
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import in_batches
from factpatch.patch import Patch, stack_patches

MAX_UPDATES = 5
SURE = 0.1  # loss at which an edit is sure: the target's tokens have probabilities of about 0.9
PARTS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # fractions of a repeated update that are tried


@dataclass(frozen=True)
class Looped(EditMethod):
    """Updates each edit until it succeeds, at most `updates` times. All updates of an edit end up in one patch.

    With `sure`, an edit that succeeds is also updated again while its loss is above that. More paraphrases then get the
    new answer, and a few more other answers change.
    """

    editor: TrainableEditor
    updates: int = MAX_UPDATES
    sure: float = math.inf

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise InputError(f"expected at least one update, found {self.updates}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is only read)
        return self.editor.name

    def edits_per_batch(self, model: TaskModel) -> int:
        return self.editor.edits_per_batch(model)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        sure = {"sure": self.sure} if self.sure < math.inf else {}
        return {**self.editor.describe(model), "loop": self.updates, **sure}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        edits = model.resolve(edits)
        patches = self.editor.propose(model, edits)
        pending = list(range(len(edits)))
        for _ in range(self.updates - 1):
            answers = model.predict_patched([patches[i] for i in pending], [edits[i].x for i in pending])
            succeeded = {i for i, answer in zip(pending, answers, strict=True) if same(answer, edits[i].a)}
            losses = self._losses(model, [(edits[i], patches[i]) for i in pending])
            again = [
                (i, answer, loss)
                for i, answer, loss in zip(pending, answers, losses, strict=True)
                if i not in succeeded or loss > self.sure
            ]
            pending = []
            for batch in in_batches(again, self.edits_per_batch(model)):
                # The editor reads the updated model's answer as the prediction.
                chosen = [replace(edits[i], y=answer) for i, answer, _ in batch]
                before = [patches[i] for i, _, _ in batch]
                stacks = self.editor.update(
                    model, self.editor.batch(model, chosen), stack_patches(before, model.layers)
                )
                extended = add_best_part(model, chosen, before, self.editor.patches(chosen, stacks))
                after = self._losses(model, list(zip(chosen, extended, strict=True)))
                for (i, _, loss), patch, loss_after in zip(batch, extended, after, strict=True):
                    if i not in succeeded or loss_after < loss:  # an edit that succeeds must not get worse
                        patches[i] = patch
                        pending.append(i)
            if not pending:
                break
        return patches

    def _losses(self, model: TaskModel, patched: Sequence[tuple[FactEdit, Patch]]) -> list[float]:
        """Returns the loss of each edit under its patch. Without `sure` they are not needed, and 0 is returned."""
        if self.sure == math.inf:
            return [0.0] * len(patched)
        losses: list[float] = []
        for batch in in_batches(patched, self.edits_per_batch(model)):
            rows = model.rows([edit.x for edit, _ in batch], [edit.a for edit, _ in batch])
            losses += losses_under(model, rows, [patch for _, patch in batch]).tolist()
        return losses


def add_best_part(
    model: TaskModel, edits: Sequence[FactEdit], patches: Sequence[Patch], updates: Sequence[Patch]
) -> list[Patch]:
    """Adds to each patch the fraction of one more update with the lowest loss; a whole update often overshoots."""
    rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
    tried: list[list[Patch]] = []
    losses: list[Tensor] = []
    for part in PARTS:
        sums = [
            {name: add(delta, scaled(update.deltas[name], part)) for name, delta in patch.deltas.items()}
            for patch, update in zip(patches, updates, strict=True)
        ]
        tried.append([replace(patch, deltas=deltas) for patch, deltas in zip(patches, sums, strict=True)])
        losses.append(losses_under(model, rows, tried[-1]))
    best = torch.stack(losses).argmin(0).tolist()  # (edits,)
    return [tried[k][e] for e, k in enumerate(best)]


def losses_under(model: TaskModel, rows: Rows, patches: Sequence[Patch]) -> Tensor:
    """Returns the loss of each row under its own patch: (rows,)."""
    with edited(model.layers, stack_patches(patches, model.layers)):
        return model.losses(rows)
