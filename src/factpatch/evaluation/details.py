"""Details for the report's figures: sizes and directions of updates, scores before and after, best answers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factpatch.data.revisions import Revision, own_forms
from factpatch.deltas import Delta, LowRank
from factpatch.engine import edited
from factpatch.evaluation.measure import Examined, Examiner
from factpatch.facts import normalize, same
from factpatch.files import atomic_file, write_safetensors
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches

SKETCH = 1024  # length of the vector that an update is projected to
EDITS, EDITS_WITH_SCORES, INPUTS_WITH_SCORES = 32, 16, 500  # maximum numbers that get details
EXAMPLES = 3
DETAILS = ("details.safetensors", "examples.json")  # the files that are written


def write_details(
    folder: Path,
    examiner: Examiner,
    patches: Sequence[Patch],
    revisions: Sequence[Revision],
    examined: Sequence[Examined],
) -> None:
    """Writes details.safetensors and examples.json for the first few edits."""
    names = list(patches[0].deltas)
    patches, revisions = patches[:EDITS], revisions[:EDITS]
    with_scores = list(zip(revisions, examined, strict=False))[:EDITS_WITH_SCORES]
    tensors = {
        "magnitudes": torch.stack([_mean_size(name, patches) for name in names]).float(),
        "sketches": torch.stack(sketches([patch.deltas for patch in patches])),
        **_scores(examiner, with_scores),
    }
    metadata = {
        "weights": json.dumps([name.removesuffix(".weight") for name in names]),
        "edits": json.dumps([revision.id for revision in revisions]),
        "scored": json.dumps([len(with_scores), min(INPUTS_WITH_SCORES, len(examiner.others))]),  # edits, inputs
    }
    write_safetensors(folder / "details.safetensors", tensors, metadata)
    examples = [
        _example(examiner.model, patch, revision, examiner.others)
        for patch, revision in list(zip(patches, revisions, strict=True))[:EXAMPLES]
    ]
    with atomic_file(folder / "examples.json") as scratch:
        scratch.write_text(json.dumps(examples, ensure_ascii=False, indent=2) + "\n")


def _mean_size(name: str, patches: Sequence[Patch]) -> Tensor:
    """Returns the root mean square of a weight's change, averaged over edits."""
    out, in_ = patches[0].deltas[name].shape
    return torch.stack([patch.deltas[name].norm() for patch in patches]).mean() / (out * in_) ** 0.5


def sketches(updates: Sequence[Mapping[str, Delta]]) -> list[Tensor]:
    """Projects each update to a short vector, such that cosines between vectors approximate those between updates.

    Entry k is Σ uₖᵀ ΔW vₖ over the weights, with random uₖ and vₖ that depend only on the weight's name.
    """
    totals = [torch.zeros(SKETCH) for _ in updates]
    for name, first in updates[0].items():
        out, in_ = first.shape
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        u, v = (torch.randn(SKETCH, width, generator=rng) for width in (out, in_))
        for total, update in zip(totals, updates, strict=True):
            total += _projected(update[name], u, v).cpu()
    return totals


def _projected(delta: Delta, u: Tensor, v: Tensor) -> Tensor:
    if isinstance(delta, LowRank):
        A, B = delta.A.float(), delta.B.float()
        return ((u.to(B.device) @ B.mT) * (v.to(A.device) @ A.mT)).sum(-1)
    dense = delta.dense()
    return ((u.to(dense.device) @ dense) * v.to(dense.device)).sum(-1)


def _scores(examiner: Examiner, examined: Sequence[tuple[Revision, Examined]]) -> dict[str, Tensor]:
    """Returns scores of the control inputs' original predictions before and after, and which changed."""
    before: list[float] = []
    after: list[float] = []
    changed: list[bool] = []
    for revision, one in examined:
        assert one.scores is not None
        assert examiner.scores_before is not None
        for i in np.flatnonzero(examiner.controls.apart_from([revision])[:INPUTS_WITH_SCORES]):
            before.append(float(examiner.scores_before[i]))
            after.append(float(one.scores[i]))
            changed.append(not same(one.says_others[i], examiner.others[i].prediction))
    return {
        "scores_before": torch.tensor(before),
        "scores_after": torch.tensor(after),
        "changed": torch.tensor(changed, dtype=torch.uint8),
    }


def _example(model: TaskModel, patch: Patch, revision: Revision, others: Sequence[Revision]) -> dict[str, Any]:
    """Returns the best answers before and after, to the edited input, a paraphrase and a control input."""
    edited_forms = own_forms(revision)
    texts = {
        "input": [revision.input],
        "paraphrase": [*revision.human_rephrases, *revision.rephrases],
        "unrelated": [other.input for other in others if normalize(other.input) not in edited_forms],
    }
    rows = []
    for kind, text in ((kind, candidates[0]) for kind, candidates in texts.items() if candidates):
        encoded = model.encode([text], model.max_input_tokens)
        before = model.candidates_encoded(encoded)[0]
        with edited(model.layers, stack_patches([patch], model.layers)):
            after = model.candidates_encoded(encoded)[0]
        rows.append({"kind": kind, "text": text, "before": before, "after": after})
    edit = patch.edits[0]
    return {"edit": {"x": edit.x, "y": edit.y, "a": edit.a}, "rows": rows}
