"""What the figures show beyond rates: sizes and directions of updates, scores before and after, beams."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from factpatch.data.revisions import Revision
from factpatch.deltas import Delta, LowRank
from factpatch.engine import edited
from factpatch.evaluation.measure import Examined, Examiner
from factpatch.facts import normalize
from factpatch.files import atomic_file
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches

SKETCH = 1024  # numbers that stand for an update
EDITS, EDITS_WITH_SCORES, INPUTS_WITH_SCORES = 32, 16, 500  # that are looked at closely
EXAMPLES = 3


def write_details(
    folder: Path,
    examiner: Examiner,
    patches: Sequence[Patch],
    revisions: Sequence[Revision],
    examined: Sequence[Examined],
) -> None:
    """Of a few edits: details.safetensors and examples.json."""
    names = list(patches[0].deltas)
    patches, revisions = patches[:EDITS], revisions[:EDITS]
    tensors = {
        "magnitudes": torch.stack([_size_of(name, patches) for name in names]).float(),
        "sketches": torch.stack(sketches([patch.deltas for patch in patches])),
        **_scores(examiner, revisions, examined),
    }
    metadata = {
        "weights": json.dumps([name.removesuffix(".weight") for name in names]),
        "edits": json.dumps([revision.id for revision in revisions]),
    }
    with atomic_file(folder / "details.safetensors") as scratch:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, scratch, metadata)
    examples = [
        _example(examiner.model, p, r, examiner.others)
        for p, r in list(zip(patches, revisions, strict=True))[:EXAMPLES]
    ]
    with atomic_file(folder / "examples.json") as scratch:
        scratch.write_text(json.dumps(examples, ensure_ascii=False, indent=2) + "\n")


def _size_of(name: str, patches: Sequence[Patch]) -> Tensor:
    """The root mean square of a weight's change, averaged over edits."""
    out, in_ = patches[0].deltas[name].shape
    return torch.stack([patch.deltas[name].norm() for patch in patches]).mean() / (out * in_) ** 0.5


def sketches(updates: Sequence[Mapping[str, Delta]]) -> list[Tensor]:
    """Each update as a short vector, such that cosines of vectors are, nearly, cosines of updates.

    Entry k is Σ uₖᵀ ΔW vₖ over the weights, with random uₖ and vₖ that depend on the weight's name alone.
    """
    totals = [torch.zeros(SKETCH) for _ in updates]
    for name, first in updates[0].items():
        out, in_ = first.shape
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        u, v = (torch.randn(SKETCH, width, generator=chance) for width in (out, in_))
        for total, update in zip(totals, updates, strict=True):
            total += _projected(update[name], u, v).cpu()
    return totals


def _projected(delta: Delta, u: Tensor, v: Tensor) -> Tensor:
    if isinstance(delta, LowRank):
        A, B = delta.A.float(), delta.B.float()
        return ((u.to(B.device) @ B.mT) * (v.to(A.device) @ A.mT)).sum(-1)
    dense = delta.dense()
    return ((u.to(dense.device) @ dense) * v.to(dense.device)).sum(-1)


def _scores(examiner: Examiner, revisions: Sequence[Revision], examined: Sequence[Examined]) -> dict[str, Tensor]:
    """Scores of other inputs' original predictions before and after, and where the prediction is another now."""
    before: list[float] = []
    after: list[float] = []
    changed: list[bool] = []
    for revision, one in list(zip(revisions, examined, strict=False))[:EDITS_WITH_SCORES]:
        assert one.scores is not None
        assert examiner.scores_before is not None
        for i, other in enumerate(examiner.others[:INPUTS_WITH_SCORES]):
            if normalize(other.input) != normalize(revision.input):
                before.append(float(examiner.scores_before[i]))
                after.append(float(one.scores[i]))
                changed.append(normalize(one.says_others[i]) != normalize(other.prediction))
    return {
        "scores_before": torch.tensor(before),
        "scores_after": torch.tensor(after),
        "changed": torch.tensor(changed, dtype=torch.uint8),
    }


def _example(model: TaskModel, patch: Patch, revision: Revision, others: Sequence[Revision]) -> dict[str, Any]:
    """The best outputs before and after, for the edited input, a paraphrase and an unrelated input."""
    paraphrases = [*revision.human_rephrases, *revision.rephrases]
    unrelated = [other.input for other in others if normalize(other.input) != normalize(revision.input)]
    texts = [("input", [revision.input]), ("paraphrase", paraphrases), ("unrelated", unrelated)]
    rows = []
    for kind, found in texts:
        if not found:
            continue
        encoded = model.encode(found[:1], model.max_input_tokens)
        before = model.candidates_encoded(encoded)[0]
        with edited(model.layers, stack_patches([patch], model.layers)):
            after = model.candidates_encoded(encoded)[0]
        rows.append({"kind": kind, "text": found[0], "before": before, "after": after})
    edit = patch.edits[0]
    return {"edit": {"x": edit.x, "y": edit.y, "a": edit.a}, "rows": rows}
