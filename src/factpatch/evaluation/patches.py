"""Measures existing patches on their own edits and on a sample of other inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from factpatch.data.revisions import Revision
from factpatch.evaluation.measure import Examiner, predicted_now
from factpatch.evaluation.merges import examine_merged
from factpatch.facts import normalize
from factpatch.metrics import summary
from factpatch.models import TaskModel
from factpatch.patch import Patch

RATES = ("success", "equivalence", "retain")


def measure_patches(
    model: TaskModel, patches: Sequence[Patch], paraphrases: Mapping[str, Sequence[str]], others: Sequence[str]
) -> list[dict[str, float | None]]:
    """Measures the RATES of several patches that make the same edits; None where there was nothing to measure.

    `paraphrases` are those of the edits' inputs, by the input's normalised text. `others` are control inputs.
    """
    edits = [
        _revision(edit.x, edit.a, paraphrases.get(normalize(edit.x), ()))
        for edit in dict.fromkeys(edit for patch in patches for edit in patch.edits)
    ]
    if not edits:
        return [dict.fromkeys(RATES) for _ in patches]
    examiner = Examiner(model, predicted_now(model, [_revision(text) for text in others]), 1)

    def rates(patch: Patch) -> dict[str, float | None]:
        metrics = summary([examined.outcome for examined in examine_merged(examiner, patch, edits)])
        return {name: metrics[name] for name in RATES}

    return [rates(patch) for patch in patches]


def _revision(text: str, target: str = "", paraphrases: Sequence[str] = ()) -> Revision:
    return Revision(text, text, "", (target,), tuple(paraphrases), (), ())
