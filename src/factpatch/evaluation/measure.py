"""Edits against paraphrases and other inputs: many edits in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from factpatch.device import varying_shapes
from factpatch.editors import EditMethod
from factpatch.engine import edited
from factpatch.facts import FactEdit, Revision
from factpatch.metrics import Outcome, outcome
from factpatch.models import Rows, TaskModel
from factpatch.patch import stack_patches

EDITS_PER_FORWARD = 32


def editable(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """The revisions that can be edits, with the alternatives that the model can be taught to say."""
    sayable = model.sayable([text for revision in revisions for text in revision.alternatives])
    kept = (replace(r, alternatives=tuple(text for text in r.alternatives if text in sayable)) for r in revisions)
    return [revision for revision in kept if revision.alternatives]


@torch.no_grad()
@varying_shapes()
def measure(
    method: EditMethod,
    model: TaskModel,
    revisions: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda edits: None,
) -> list[Outcome]:
    """Edits each revision to its likeliest alternative, and looks at what the edited model says.

    Each edit is made and measured on its own; that they share forwards changes no result.
    """
    order = sorted(range(len(revisions)), key=lambda i: len(revisions[i].input))
    outcomes: dict[int, Outcome] = {}
    for start in range(0, len(order), EDITS_PER_FORWARD):
        batch = order[start : start + EDITS_PER_FORWARD]
        measured = _measure_batch(method, model, [revisions[i] for i in batch], others)
        outcomes.update(zip(batch, measured, strict=True))
        on_done(len(batch))
    return [outcomes[i] for i in range(len(revisions))]


def _measure_batch(
    method: EditMethod, model: TaskModel, revisions: list[Revision], others: Sequence[Revision]
) -> list[Outcome]:
    edits = [FactEdit(x=r.input, y=r.prediction, a=r.alternatives[0]) for r in revisions]
    patches = method.propose(model, edits)
    own_texts = [[r.input, *r.rephrases, *r.human_rephrases] for r in revisions]
    with edited(model.layers, stack_patches(patches, model.layers)):
        own = _say_each(model, own_texts)
        to_others = _say_all(model, [other.input for other in others], len(edits))
    return [
        outcome(revision, edit.a, dict(zip(texts, said, strict=True)), others, said_others)
        for revision, edit, texts, said, said_others in zip(revisions, edits, own_texts, own, to_others, strict=True)
    ]


def _say_each(model: TaskModel, texts: list[list[str]]) -> list[list[str]]:
    """What each edit says to its own texts. Edits with fewer texts say their first again, so that rows line up."""
    most = max(map(len, texts))
    columns = [[own[k] if k < len(own) else own[0] for own in texts] for k in range(most)]
    longest = [max(map(len, column)) for column in columns]
    said: list[list[str]] = [[""] * most for _ in texts]
    for batch in model.batches([length * len(texts) // 4 for length in longest]):
        rows = [columns[k][e] for e in range(len(texts)) for k in batch]
        decided = iter(model.decide(model.collate(model.encode(rows, model.max_input_tokens))))
        for e in range(len(texts)):
            for k in batch:
                said[e][k] = next(decided)[0]
    return [own[: len(mine)] for own, mine in zip(said, texts, strict=True)]


def _say_all(model: TaskModel, texts: list[str], edits: int) -> list[list[str]]:
    """What every edit says to all texts; texts of like length share a forward."""
    encoded = model.encode(texts, model.max_input_tokens)
    said = [[""] * len(texts) for _ in range(edits)]
    for batch in model.batches([len(one["input_ids"]) * edits for one in encoded]):
        rows = model.collate([encoded[i] for i in batch])
        repeated = Rows({key: tensor.repeat(edits, 1) for key, tensor in rows.inputs.items()})
        decided = iter(model.decide(repeated))
        for e in range(edits):
            for i in batch:
                said[e][i] = next(decided)[0]
    return said
