"""Refining a merged patch: it improves what it optimises, and depends only on the set of facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import loud_editor
from samples import revisions

from factpatch import refining
from factpatch.data.revisions import edit_of
from factpatch.deltas import Dense
from factpatch.engine import edited
from factpatch.errors import InputError, MismatchError
from factpatch.facts import same
from factpatch.merging import merge
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.refining import refine


@pytest.fixture
def merged(model: TaskModel) -> tuple[Patch, list[str]]:
    known = revisions(model, 12)
    edits = [edit_of(revision) for revision in known[:3]]
    if model.kind != "classifier":
        edits = [replace(edit, a=word) for edit, word in zip(edits, ("paris", "franc", "swahili"), strict=True)]
    patches = loud_editor(model).propose(model, edits)
    others = [revision.input for revision in known[3:]]
    return merge(model, patches, others), others


def objective(model: TaskModel, patch: Patch, others: list[str]) -> float:
    controls = refining._controls(model, others, set())
    edits = refining._texts(model, [(edit.x, edit.a) for edit in patch.edits])
    with torch.no_grad(), edited(model.layers, {name: Dense(d.dense()[None]) for name, d in patch.deltas.items()}):
        return float(refining._loss(model, edits) + refining._loss(model, controls))


@pytest.mark.parametrize("architecture", ["bert", "bart", "t5", "gpt2-lm", "qwen2"])
def test_refining_lowers_the_objective_and_makes_edits_succeed(
    model: TaskModel, architecture: str, merged: tuple[Patch, list[str]]
) -> None:
    patch, others = merged
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    steps: list[None] = []
    refined = refine(model, patch, others, steps=60, on_step=lambda: steps.append(None))
    assert objective(model, refined, others) < 0.5 * objective(model, patch, others)
    if model.kind == "classifier":  # a random encoder-decoder answers at such length that it is hard to teach
        with refined.applied(model):
            answers = model.predict([edit.x for edit in refined.edits])
        assert all(same(answer, edit.a) for answer, edit in zip(answers, refined.edits, strict=True))
    assert len(steps) == 60
    assert refined.method.endswith(", merged, refined")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())


@pytest.mark.parametrize("architecture", ["bart"])
def test_passes_and_order_change_nothing_beyond_rounding(
    model: TaskModel, merged: tuple[Patch, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, others = merged
    whole = refine(model, patch, others, steps=3)
    known = dict(zip(others, model.predict(others), strict=True))
    assert refine(model, patch, dict(reversed(known.items())), steps=3) == whole
    monkeypatch.setitem(refining.TOKENS_PER_PASS, "cpu", 1)  # one text per pass
    for name, delta in refine(model, patch, others, steps=3).deltas.items():
        moved = (whole.deltas[name].dense() - patch.deltas[name].dense()).abs().mean()
        assert (delta.dense() - whole.deltas[name].dense()).abs().mean() < 0.01 * moved


@pytest.mark.parametrize("architecture", ["gpt2-lm"])
def test_control_inputs_whose_answers_are_no_targets(model: TaskModel, merged: tuple[Patch, list[str]]) -> None:
    patch, others = merged
    with pytest.raises(InputError, match="found no usable text"):
        refine(model, patch, dict.fromkeys(others, ""))


@pytest.mark.parametrize("architecture", ["bert"])
def test_bad_input_is_refused(model: TaskModel, merged: tuple[Patch, list[str]]) -> None:
    patch, others = merged
    with pytest.raises(InputError, match="found no usable text"):
        refine(model, patch, [edit.x for edit in patch.edits])
    with pytest.raises(InputError, match="at least one step, found 0"):
        refine(model, patch, others, steps=0)
    with pytest.raises(InputError, match="names its edits"):
        refine(model, Patch(patch.deltas, patch.base, "x", ()), others)
    with pytest.raises(MismatchError):
        refine(model, Patch(patch.deltas, "0" * 64, "x", patch.edits), others)
