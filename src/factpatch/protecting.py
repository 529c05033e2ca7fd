"""Protecting other answers: any edit method in least-squares form, fitted to inputs whose answers should stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from factpatch.covariance import Covariance
from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.facts import FactEdit, same
from factpatch.merging import RIDGE, Mode, merge
from factpatch.models import TaskModel
from factpatch.patch import Patch


@dataclass(frozen=True)
class Protected(EditMethod):
    """Merges each patch of a method on its own, which changes other answers less.

    A patch that would no longer succeed is left as the method made it.
    """

    method: EditMethod
    covariance: Covariance
    ridge: float = RIDGE
    mode: Mode = "sequence"

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is only read)
        return self.method.name

    def edits_per_batch(self, model: TaskModel) -> int:
        return self.method.edits_per_batch(model)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {**self.method.describe(model), "ridge": self.ridge, "mode": self.mode}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        patches = self.method.propose(model, edits)
        solved = [
            merge(model, [patch], covariance=self.covariance, ridge=self.ridge, mode=self.mode) for patch in patches
        ]
        answers = model.predict_patched(solved, [patch.edits[0].x for patch in solved])
        return [
            new if same(answer, new.edits[0].a) else old
            for old, new, answer in zip(patches, solved, answers, strict=True)
        ]


def protect(
    method: EditMethod,
    model: TaskModel,
    others: Iterable[str],
    answers: dict[str, str] | None = None,
    ridge: float = RIDGE,
) -> EditMethod:
    """Returns a method whose patches change the answers to `others`, and to inputs like them, less.

    `answers` are the model's answers to these inputs, if they are known. A trained editor, looped or not, is itself
    switched to updates in least-squares form.
    """
    covariance = Covariance.compute(model, others, answers)
    editor = method.editor if isinstance(method, Looped) else method
    if isinstance(editor, TrainableEditor):
        editor.solve_against(covariance, ridge)
        return method
    return Protected(method, covariance, ridge)
