"""Protecting other answers: any edit method in least-squares form, fitted to inputs whose answers should stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from factpatch.covariance import Covariance
from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.facts import FactEdit, same
from factpatch.merging import MODES, RIDGE, merge
from factpatch.models import TaskModel
from factpatch.patch import Patch


@dataclass(frozen=True)
class Protected(EditMethod):
    """Merges each patch of a method on its own, which changes other answers less.

    If the edit then fails, the patch is merged layer after layer, which takes longer. If it still fails, the patch is
    left as the method made it.
    """

    method: EditMethod
    covariance: Covariance
    ridge: float = RIDGE

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is only read)
        return self.method.name

    def edits_per_batch(self, model: TaskModel) -> int:
        return self.method.edits_per_batch(model)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {**self.method.describe(model), "ridge": self.ridge}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        found = self.method.propose(model, edits)
        failed = list(range(len(found)))
        for mode in MODES:
            solved = [merge(model, [found[i]], covariance=self.covariance, ridge=self.ridge, mode=mode) for i in failed]
            answers = model.predict_patched(solved, [patch.edits[0].x for patch in solved])
            succeed = [same(answer, patch.edits[0].a) for answer, patch in zip(answers, solved, strict=True)]
            for i, patch, success in zip(failed, solved, succeed, strict=True):
                found[i] = patch if success else found[i]
            failed = [i for i, success in zip(failed, succeed, strict=True) if not success]
        return found


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
