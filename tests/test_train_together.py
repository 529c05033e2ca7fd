"""Training through the merge: gradients against autograd through the whole solve, and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import loud_editor
from samples import revisions
from training_runs import QUICK, start

from factpatch.covariance import Covariance
from factpatch.deltas import Dense
from factpatch.editors import load_editor
from factpatch.errors import InputError, MismatchError
from factpatch.facts import FactEdit
from factpatch.merging import merge
from factpatch.models import TaskModel, load_model
from factpatch.solving import cholesky
from factpatch.training import Train, TrainConfig
from factpatch.training.batcher import Batcher
from factpatch.training.objective import Objective
from factpatch.training.sampler import Sampler
from factpatch.training.together import MergedGradients, merged_at


def test_the_number_of_merged_edits_doubles_over_the_first_half() -> None:
    assert [merged_at(share, 64) for share in (0, 0.1, 0.2, 0.3, 0.45, 0.5, 1)] == [8, 8, 16, 32, 64, 64, 64]
    assert {merged_at(share / 10, 6) for share in range(11)} == {6}


@pytest.mark.parametrize("architecture", ["bert", "bart", "t5", "llama"])
def test_gradients_are_those_of_the_whole_solve(
    model: TaskModel, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, they equal what autograd finds through capture, editor and solve in one graph."""
    monkeypatch.setattr(MergedGradients, "_edits_per_chunk", lambda *_: 2)
    known = revisions(model, 12)
    editor = loud_editor(model)
    log_ridge = editor.learn_ridge()
    with torch.no_grad():
        log_ridge.uniform_(-1, 1)
    config = TrainConfig(together=3, rows=4, paraphrases="none")
    batch = Batcher(model, editor, known, config).batch(Sampler(known, config).plan(0), total=3)
    objective = Objective(model, config)
    covariance = Covariance.compute(model, [revision.input for revision in known])
    figures, *found = MergedGradients(editor, objective, covariance)(
        batch, lambda measured: measured.loss + 0.5 * measured.constraints.sum()
    )

    merged = MergedGradients(editor, objective, covariance)
    changes = {}
    ridge = dict(zip(editor.shapes, log_ridge.double().exp(), strict=True))
    for name, K, V in merged._keys_and_values(batch.edit_batch):
        K, V = K.double(), V.double()
        M = K.mT @ K + 3 * ridge[name] * covariance.of(name, model.device)
        changes[name] = Dense((V.mT @ K @ torch.linalg.inv(M)).float()[None])
    measured = objective.measure(batch, changes)
    whole = measured.loss + 0.5 * measured.constraints.sum()
    expected = torch.autograd.grad(whole, list(editor.parameters()), materialize_grads=True)
    torch.testing.assert_close(figures[0], measured.loss.detach(), rtol=1e-4, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4 * largest)
    assert float(expected[0].abs().max()) > 1e-3 * largest, "the ridge must matter, or this test shows nothing"


def test_a_singular_matrix_of_a_batch_is_shifted_alone() -> None:
    regular = torch.eye(3, dtype=torch.float64)
    singular = torch.ones(3, 3, dtype=torch.float64)
    root = cholesky(torch.stack([regular, singular]))
    assert torch.equal(root[0], regular)
    torch.testing.assert_close(root[1] @ root[1].mT, singular, rtol=0, atol=1e-5)
    with pytest.raises(MismatchError, match="cannot solve the merge"):
        cholesky(torch.stack([regular, -regular]))


def test_a_step_needs_control_inputs() -> None:
    model = tiny.build("bert")
    known = revisions(model, 12)
    with pytest.raises(InputError, match="together=64 leaves no control inputs among 12 revisions; lower it"):
        Sampler(known, TrainConfig(together=64, rows=3, paraphrases="none")).plan(0)
    with pytest.raises(InputError, match="together=8 needs updates=1, split=1"):
        TrainConfig(together=8, split=2)


@pytest.mark.parametrize("architecture", ["bert", "bart", "gpt2-lm", "llama"])
def test_training_sees_what_merge_makes(model: TaskModel) -> None:
    known = revisions(model, 12)
    editor = loud_editor(model)
    with torch.no_grad():
        editor.learn_ridge().fill_(0.3)
    config = TrainConfig(together=4, rows=3, paraphrases="none")
    sampler = Sampler(known, config)
    plan = sampler.plan(0)
    batch = Batcher(model, editor, known, config).batch(plan, total=4)
    covariance = Covariance.compute(model, [revision.input for revision in known])
    solved = MergedGradients(editor, Objective(model, config), covariance)._solve(batch.edit_batch, editor.ridges())
    changes = {name: S for group in solved for name, S in zip(group.names, group.S, strict=True)}
    edits = [
        FactEdit(known[i].input, known[i].alternatives[k], known[i].prediction)
        for i, k in zip(plan.edited, plan.targets, strict=True)
    ]
    patch = merge(model, editor.propose(model, edits), covariance=covariance)
    for name, delta in patch.deltas.items():
        torch.testing.assert_close(
            delta.dense(), changes[name].float(), rtol=1e-3, atol=1e-3 * float(delta.dense().abs().max())
        )


def test_a_merge_can_start_from_an_editor_in_least_squares_form(checker: Path, claims: Path, tmp_path: Path) -> None:
    """The merge takes the place of that form: training reads the updates themselves, and so must the saved editor."""
    start(replace(QUICK, ridge=1.0), checker, tmp_path / "first").run(claims)
    assert load_editor(tmp_path / "first").least_squares is not None
    config = replace(QUICK, together=4)
    Train(config, load_model(checker, "cpu"), tmp_path / "second", init=tmp_path / "first").run(claims)
    assert load_editor(tmp_path / "second").least_squares is None
