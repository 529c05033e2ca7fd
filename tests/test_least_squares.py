"""The least-squares form of an editor's updates, against the merge of a single patch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from conftest import Ran, loud_editor
from samples import revisions, texts, write_revisions

from factpatch.covariance import Covariance
from factpatch.data.revisions import edit_of, editable, read_revisions
from factpatch.deltas import LowRank
from factpatch.editors import HyperNetwork, Looped, load_editor
from factpatch.editors.least_squares import LeastSquares
from factpatch.engine import Trace, edited
from factpatch.errors import FileError, InputError
from factpatch.facts import FactEdit
from factpatch.merging import merge
from factpatch.models import TaskModel
from factpatch.patch import stack_patches, weight_shape

RIDGE = 0.3


@pytest.fixture
def covariance(model: TaskModel) -> Covariance:
    return Covariance.compute(model, texts(30, seed=5))


def test_it_is_the_merge_of_each_single_patch(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], covariance: Covariance
) -> None:
    plain = editor.propose(model, edits)
    editor.solve_against(covariance, RIDGE, shrinkage=0)
    solved = editor.propose(model, edits)
    for before, after in zip(plain, solved, strict=True):
        expected = merge(model, [before], covariance=covariance, ridge=RIDGE)
        for name, delta in expected.deltas.items():
            wanted = delta.dense()
            torch.testing.assert_close(after.deltas[name].dense(), wanted, rtol=1e-2, atol=1e-3 * float(wanted.norm()))
    name = next(iter(plain[0].deltas))
    assert not torch.allclose(plain[0].deltas[name].dense(), solved[0].deltas[name].dense(), rtol=1e-2)


@pytest.mark.parametrize("architecture", ["bert", "bart", "llama"])
def test_gradients_reach_the_editor(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], covariance: Covariance
) -> None:
    """Against finite differences along a random direction."""
    editor.double()
    model.cast(torch.float64)
    editor.solve_against(covariance, RIDGE)
    batch = editor.batch(model, edits)
    parameters = [p for p in editor.parameters() if p.requires_grad]
    torch.manual_seed(0)
    directions = [torch.randn_like(p) for p in parameters]

    def loss() -> torch.Tensor:
        with edited(model.layers, editor.update(model, batch)):
            return model.losses(batch.rows).sum()

    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    step = 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
            values.append(float(loss()))
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=sign * step)
    assert slope != 0
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.05)


@pytest.mark.parametrize("architecture", ["bert", "bart"])
def test_other_inputs_change_less(model: TaskModel, editor: HyperNetwork, covariance: Covariance) -> None:
    """The KL at the inputs of the sample shrinks, whereas the edits' own losses stay much closer to those before."""
    known = revisions(model, 30, seed=5)
    edits = [edit_of(revision) for revision in editable(model, revisions(model, 8))]
    own = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
    others = model.rows([r.input for r in known] * len(edits), [r.prediction for r in known] * len(edits))

    def losses(batch: HyperNetwork) -> tuple[float, float]:
        with torch.no_grad(), edited(model.layers, batch.changes(model, edits)):
            return float(model.losses(own).mean()), float(model.losses(others).mean())

    with torch.no_grad():
        unedited = float(model.losses(own).mean()), float(model.losses(others).mean())
    plain = losses(editor)
    editor.solve_against(covariance, 1.0)
    solved = losses(editor)
    assert abs(solved[1] - unedited[1]) < abs(plain[1] - unedited[1])


@pytest.mark.parametrize("architecture", ["bart"])
def test_it_is_saved_with_the_editor(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], covariance: Covariance, tmp_path: Path
) -> None:
    editor.solve_against(covariance, RIDGE)
    editor.save(tmp_path / "editor")
    loaded = load_editor(tmp_path / "editor")
    assert loaded.describe(model) == editor.describe(model)
    for one, other in zip(Looped(editor).propose(model, edits), Looped(loaded).propose(model, edits), strict=True):
        assert all(torch.equal(one.deltas[name].dense(), delta.dense()) for name, delta in other.deltas.items())
    (tmp_path / "editor" / "config.json").write_text(
        (tmp_path / "editor" / "config.json").read_text().replace('"ridge": 0.3', '"ridge": 0.4')
    )
    with pytest.raises(FileError, match="checksum"):
        load_editor(tmp_path / "editor")


@pytest.mark.parametrize("architecture", ["bart"])
def test_padding_does_not_matter(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], covariance: Covariance
) -> None:
    """An edit's change is the same alone and in a batch with longer ones."""
    editor.solve_against(covariance, RIDGE)
    together = editor.propose(model, edits)
    for edit, patch in zip(edits, together, strict=True):
        (alone,) = editor.propose(model, [edit])
        stacks = stack_patches([alone, patch], model.layers)
        for name, delta in stacks.items():
            first, second = delta.dense()
            torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4 * float(first.norm()))
            assert patch.deltas[name].rank == alone.deltas[name].rank


def test_settings_that_make_no_sense() -> None:
    model = tiny.build("bert")
    covariance = Covariance.compute(model, ["where do people speak rundi ?"])
    with pytest.raises(InputError, match="expected a ridge above 0, found 0"):
        loud_editor(model).solve_against(covariance, 0)
    with pytest.raises(InputError, match="expected a shrinkage of at least 0, found -1"):
        loud_editor(model).solve_against(covariance, shrinkage=-1)


@pytest.mark.parametrize("architecture", ["bert"])
def test_evaluating_it(model: TaskModel, editor: HyperNetwork, tmp_path: Path, run: Callable[..., Ran]) -> None:
    """The figures are those of an editor that was saved with the same covariance."""
    model.save(tmp_path / "model")
    editor.save(tmp_path / "editor")
    data = write_revisions(tmp_path / "data.jsonl", model, 24)
    others = write_revisions(tmp_path / "others.jsonl", model, 30, seed=5)
    options = ["evaluate", "--model", tmp_path / "model", "--data", data, "--device", "cpu", "--json"]
    plain = [*options, "--editor", tmp_path / "editor"]
    solved = run(*plain, "--others", others, "--ridge", RIDGE, "--output", tmp_path / "solved").json
    editor.solve_against(Covariance.compute(model, [r.input for r in read_revisions(others)]), RIDGE)
    editor.save(tmp_path / "saved")
    saved = run(*options, "--editor", tmp_path / "saved", "--output", tmp_path / "saved-run").json
    keys = ("success", "retain", "equivalence", "kl_mean")
    assert {key: solved[key] for key in keys} == pytest.approx({key: saved[key] for key in keys}, rel=1e-4)
    before = run(*plain, "--output", tmp_path / "plain").json
    assert solved["kl_mean"] != pytest.approx(before["kl_mean"], rel=1e-2)
    again = run(*plain, "--others", others, "--ridge", 0.5, "--output", tmp_path / "solved")
    assert again.code == 1
    assert "other results" in again.err


def test_bf16(model: TaskModel, covariance: Covariance) -> None:
    """In bf16, products are computed in float32. Only the rounding of the factors shows."""
    shapes = {name: weight_shape(layer) for name, layer in model.layers.items() if name in covariance.readers}
    solver = LeastSquares.fitted(covariance, shapes, RIDGE, 0.01, model.device)
    torch.manual_seed(0)
    inputs = {key: torch.randn(2, 5, shapes[names[0]][1]).bfloat16() for key, names in solver.weights.items()}
    deltas = {name: LowRank(torch.randn(2, 3, in_), torch.randn(2, 3, out)) for name, (out, in_) in shapes.items()}
    real = [torch.tensor([[True] * 5, [True, True, True, False, False]])]
    changes = []
    for dtype in (torch.bfloat16, torch.float64):
        traces = {name: Trace(x := inputs[solver.readers[name]].to(dtype), torch.zeros_like(x)) for name in shapes}
        changes.append(solver(deltas, traces, real))
    for name in shapes:
        found, expected = (change[name].dense().double() for change in changes)
        assert (found - expected).norm() < 2e-2 * expected.norm()
