"""UltraEdit: its formula for one fact and for many, in turns, and the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, weights_of
from samples import revisions, texts

from factpatch.data.revisions import edit_of
from factpatch.editors import create_method
from factpatch.editors.normalising import EPSILON
from factpatch.editors.ultraedit import UltraEdit
from factpatch.engine import Trace, capture
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import TaskModel
from factpatch.patch import Patch

Tokens = dict[str, tuple[torch.Tensor, torch.Tensor]]


def tokens(model: TaskModel, edits: list[FactEdit]) -> Tokens:
    """The inputs and gradients of all tokens with a gradient in each layer, edit by edit, each run without padding."""
    traces: list[dict[str, Trace]] = []
    for edit in edits:
        rows = model.rows([edit.x], [edit.a])
        traces.append(capture(model.layers, lambda rows=rows: model.losses(rows)))
    found: Tokens = {}
    for name in model.layers:
        K, G = torch.cat([t[name].X[0] for t in traces]), torch.cat([t[name].D[0] for t in traces])
        found[name] = K[G.ne(0).any(-1)], G[G.ne(0).any(-1)]
    return found


def reference(K: torch.Tensor, G: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, lr: float) -> torch.Tensor:
    """S = (KᵀK + I)⁻¹ Kᵀ D, transposed to (out, in), with a dense inverse."""
    u, g = ((torch.cat([K, G], -1) - mean) / (std + EPSILON)).split([K.shape[1], G.shape[1]], -1)
    D = -lr * u.square().sum(-1, keepdim=True) * g
    return (torch.linalg.inv(K.T @ K + torch.eye(K.shape[1], dtype=K.dtype)) @ K.T @ D).T


def moments(K: torch.Tensor, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat([K, G], -1)
    std = both.std(0)
    return both.mean(0), std.where(std > 0, 1.0)


def dense(patch: Patch, name: str) -> torch.Tensor:
    found = patch.deltas[name].tensors
    return found["delta"] if "delta" in found else found["B"].mT @ found["A"]


def test_single_edits_are_the_formula(model: TaskModel, edits: list[FactEdit]) -> None:
    model.cast(torch.float64)
    sample = [r for r in revisions(model, 12) if r.alternatives]
    method = UltraEdit(lr=1e-3).calibrated(model, sample)
    before = weights_of(model)
    patches = method.propose(model, edits)
    assert_untouched(model, before)
    of_sample, of_edits = tokens(model, [edit_of(r) for r in sample]), [tokens(model, [edit]) for edit in edits]
    for name in patches[0].deltas:
        mean, std = moments(*of_sample[name])
        for of_edit, patch in zip(of_edits, patches, strict=True):
            expected = reference(*of_edit[name], mean, std, 1e-3)
            torch.testing.assert_close(dense(patch, name), expected, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "bart", "t5", "llama"])
def test_many_edits_are_made_in_turns(model: TaskModel) -> None:
    """The second turn runs on the model that the first has edited, and is normalised by the tokens of both."""
    model.cast(torch.float64)
    edits = model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in texts(5)])
    method = UltraEdit(lr=1e-3, turn=3)
    before = weights_of(model)
    joint = method.propose_together(model, edits)
    assert_untouched(model, before)
    first = replace(method, turn=9).propose_together(model, edits[:3])
    earlier = tokens(model, edits[:3])
    for name in joint.deltas:
        K, G = earlier[name]
        torch.testing.assert_close(dense(first, name), reference(K, G, *moments(K, G), 1e-3), rtol=1e-5, atol=1e-10)
    with first.applied(model):
        later = tokens(model, edits[3:])
    for name in joint.deltas:
        K, G = later[name]
        both = [torch.cat(pair) for pair in zip(earlier[name], (K, G), strict=True)]
        second = reference(K, G, *moments(*both), 1e-3)
        expected = dense(first, name) + second
        torch.testing.assert_close(dense(joint, name).double(), expected, rtol=1e-3, atol=1e-6)  # summed in float32
        assert expected.abs().max() > 1e-4
    assert joint.edits == tuple(edits)


@pytest.mark.parametrize("architecture", ["bert", "bart", "llama"])
def test_edits_succeed(model: TaskModel) -> None:
    (edit,) = model.resolve([FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))])
    sample = [r for r in revisions(model, 12) if r.alternatives]
    rows = model.rows([edit.x], [edit.a])
    found = []
    for lr in (1e-4, 1e-3, 1e-2, 3e-2, 1e-1):
        (patch,) = UltraEdit(layers="all", lr=lr).calibrated(model, sample).propose(model, [edit])
        with patch.applied(model), torch.no_grad():
            found.append((model.losses(rows).item(), same(model.predict([edit.x])[0], edit.a)))
    with torch.no_grad():
        assert min(found)[0] < model.losses(rows).item()
    if model.kind == "classifier":
        assert any(success for _, success in found)


def test_it_says_what_it_needs() -> None:
    model = tiny.build("bert")
    with pytest.raises(InputError, match="calibrate it on some revisions"):
        UltraEdit().propose(model, [FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))])
    with pytest.raises(InputError, match="no option rank; its options are layers, lr, turn"):
        create_method("ultraedit", rank=3)
    with pytest.raises(InputError, match="no option _moments"):
        create_method("ultraedit", _moments={})


def test_the_command_line(checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    common = ["--model", checker, "--data", claims, "--edits", 8, "--retain", 20, "--device", "cpu"]
    mine = ["--method", "ultraedit", "--set", "lr=1e-2", "--layers", "mlp"]
    joint = ["--together", "2,4", "--merge", "own", "--output", tmp_path / "result"]
    result = run("evaluate", *common, *mine, *joint, "--json").json
    assert 0 <= result["success"] <= 1
    assert [point["facts"] for point in result["curve"]] == [2, 4]
    assert run("report", tmp_path / "result", "--output", tmp_path / "report").code == 0
    assert "UltraEdit, mlp" in (tmp_path / "report" / "table.md").read_text(encoding="utf-8")
    wrong = ["--method", "finetune", "--together", "2", "--merge", "own", "--output", tmp_path / "no"]
    refused = run("evaluate", *common, *wrong)
    assert (refused.code, "finetune edits one fact at a time" in refused.err) == (1, True)
    common += ["--output", tmp_path / "no"]
    assert "lr='fast' must be a number" in run("evaluate", *common, "--method", "ultraedit", "--set", "lr=fast").err
    assert "options above 0, found turn=0" in run("evaluate", *common, "--method", "ultraedit", "--set", "turn=0").err
    assert "no option speed" in run("evaluate", *common, *mine, "--set", "speed=1").err
