"""MEND: its formula, its start at the identity, its statistics, its folder, and a short training run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, weights_of
from samples import revisions, write_revisions

from factpatch.editors import load_editor
from factpatch.editors.mend import SPEED, Mend, MendConfig
from factpatch.editors.normalising import EPSILON, Moments
from factpatch.engine import capture
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.layers import block_names, feed_forward_weights
from factpatch.patch import weight_shape
from factpatch.training.lagrangian import Lagrangian


def calibrated(model: TaskModel, config: MendConfig | None = None) -> Mend:
    torch.manual_seed(0)
    return Mend.for_model(model, config or MendConfig(rank=8)).calibrated(model, revisions(model, 12))


def shaken(editor: Mend) -> Mend:
    """An editor whose parameters are all random."""
    torch.manual_seed(1)
    with torch.no_grad():
        for group in editor.groups.values():
            for name in ("U", "scale", "shift"):
                getattr(group, name).normal_(std=0.3)
    return editor


def test_the_feed_forward_weights_are_those_outside_attention(model: TaskModel) -> None:
    found = feed_forward_weights(model.model, model.layers)
    assert list(found) == block_names(model.layers)
    hidden, inner = 32, 48 if "gpt2" not in model.model.config.model_type else 128
    gated = model.model.config.model_type in ("llama", "qwen2", "gemma3_text")
    for names in found.values():
        assert len(names) == 2 + gated, names
        shapes = [weight_shape(model.layers[name]) for name in names]
        assert shapes == [(inner, hidden)] * (1 + gated) + [(hidden, inner)], "the down-projection comes last"
    last = feed_forward_weights(model.model, model.layers, blocks=1)
    assert [block for block in found if block.endswith(".1")] == list(last), "the last block of each stack"


def reference(editor: Mend, model: TaskModel, edit: FactEdit, name: str) -> torch.Tensor:
    """ΔW = −η Σ g̃ ũᵀ for one weight, token by token, as dense matrices in float64."""
    rows = model.rows([edit.x], [edit.a])
    trace = capture(model.layers, lambda: model.losses(rows))[name]
    key, number = next((k, names.index(name)) for k, names in editor.weights_of.items() if name in names)
    group = editor.groups[key].double()
    total = torch.zeros(trace.D.shape[-1], trace.X.shape[-1], dtype=torch.float64)
    for u, g in zip(trace.X[0].double(), trace.D[0].double(), strict=True):
        if not g.any():
            continue
        z = (torch.cat([u, g]) - group.mean[number]) / (group.std[number] + EPSILON)
        for i in range(2):
            dense = group.U[i] @ group.V[i]
            z = z + torch.relu(group.scale[number, i] * (dense @ z) + group.shift[number, i])
        u, g = z[: len(u)], z[len(u) :]
        total += -torch.exp(SPEED * group.log_rate[number]) * torch.outer(g, u)
    return total.detach()


def test_patches_are_the_formula(model: TaskModel, edits: list[FactEdit]) -> None:
    model.cast(torch.float64)
    editor = shaken(calibrated(model)).double()
    before = weights_of(model)
    patches = editor.propose(model, edits)
    assert_untouched(model, before)
    for edit, patch in zip(edits, patches, strict=True):
        assert patch.deltas.keys() == editor.shapes.keys()
        for name, delta in patch.deltas.items():
            expected = reference(editor, model, edit, name)
            got = delta.tensors["B"].mT @ delta.tensors["A"]
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("architecture", ["bert", "bart", "llama"])
def test_a_new_editor_takes_a_step_along_the_normalised_gradient(model: TaskModel, edits: list[FactEdit]) -> None:
    """At first the network is the identity, and yet all its parameters that matter have a gradient."""
    editor = calibrated(model)
    rate = 1e-4 if model.kind == "classifier" else 1e-5
    batch = editor.batch(model, edits)
    traces = editor.trace(model, batch)
    deltas = editor.update(model, batch)
    for key, names in editor.weights_of.items():
        group = editor.groups[key]
        for i, name in enumerate(names):
            both = torch.cat([traces[name].X, traces[name].D], -1)
            z = (both - group.mean[i]) / (group.std[i] + EPSILON) * traces[name].D.ne(0).any(-1, keepdim=True)
            u, g = z.split([traces[name].X.shape[-1], traces[name].D.shape[-1]], -1)
            torch.testing.assert_close(deltas[name].tensors["A"], u)
            torch.testing.assert_close(deltas[name].tensors["B"], -rate * g, rtol=1e-4, atol=1e-9)
    sum(d.dense().square().sum() for d in deltas.values()).backward()
    for group in editor.groups.values():
        for parameter in (group.U, group.log_rate):
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0


def test_statistics_are_those_of_all_tokens_with_a_gradient() -> None:
    model = tiny.build("bart")
    editor = calibrated(model)
    sample = [r for r in revisions(model, 12) if r.alternatives]
    name = next(iter(editor.shapes))
    seen = []
    for one in sample:
        rows = model.rows([one.input], [one.alternatives[0]])
        trace = capture(model.layers, lambda rows=rows: model.losses(rows))[name]
        seen.append(torch.cat([trace.X, trace.D], -1)[0][trace.D[0].ne(0).any(-1)])
    both = torch.cat(seen)
    group = editor.groups[next(key for key, names in editor.weights_of.items() if name == names[0])]
    torch.testing.assert_close(group.mean[0], both.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(group.std[0], both.std(0), rtol=1e-3, atol=1e-6)


def test_running_moments_do_not_depend_on_the_order_of_batches() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1, 0.0]) + 3
    found = Moments.empty(4, x)
    for part in x.split([7, 1, 30, 12]):
        found = found.plus(part)
    torch.testing.assert_close(found.mean, x.mean(0))
    torch.testing.assert_close(found.std[:3], x.std(0)[:3])
    assert found.std[3] == 1, "a constant coordinate must not be divided by 0"
    assert (found.std > 0).all()
    assert found.plus(x[:0]) is found


def test_the_default_layers_are_the_last_blocks() -> None:
    model = tiny.build("bart")
    assert len(Mend.for_model(model, MendConfig(rank=4, blocks=1)).shapes) == 4
    assert len(Mend.for_model(model, MendConfig(rank=4)).shapes) == 8
    attention = Mend.for_model(model, MendConfig(rank=4), ["*decoder.layers.0.self_attn*"])
    assert len(attention.shapes) == 4
    with pytest.raises(InputError, match="blocks=0"):
        MendConfig(blocks=0)


def test_an_editor_is_the_same_after_saving(tmp_path: Path) -> None:
    model = tiny.build("bert")
    editor = shaken(calibrated(model))
    editor.save(tmp_path / "editor")
    loaded = load_editor(tmp_path / "editor")
    assert isinstance(loaded, Mend)
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))
    assert loaded.propose(model, [edit]) == editor.propose(model, [edit])


def test_a_constant_multiplier_stays() -> None:
    lagrangian = Lagrangian({"kl": (0.1, 0.01)}, constant=10.0)
    lagrangian.update(torch.tensor([5.0]), lr=0.1)
    assert lagrangian.multipliers.tolist() == [10.0]
    assert lagrangian.penalty(torch.tensor([2.0])) == 20.0


def test_the_command_line_trains_and_evaluates_it(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    """A short run: its edits succeed more often than those of the untrained editor."""
    settings = {"edits": 8, "rows": 6, "editor.rank": 16, "editor.rate": 1e-3, "lr": 3e-3, "validations": 3}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    small = ["--set", "validation_edits=6", "--set", "validation_inputs=6", "--set", "multiplier=0.1"]
    common = ["--model", checker, "--device", "cpu", "--json"]
    trained = run(
        "train", *common, "--train", claims, "--output", tmp_path / "run", "--method", "mend", "--steps", 60,
        *options, *small,
    ).json  # fmt: skip
    assert trained["steps"] == 60
    editor = ["--editor", tmp_path / "run", "--data", claims, "--edits", 12, "--retain", 10]
    result = run("evaluate", *common, *editor, "--output", tmp_path / "result").json
    assert result["success"] > 0.7
    wrong = run("train", *common, "--train", claims, "--output", tmp_path / "no", "--method", "finetune")
    assert wrong.code == 1
    assert "method=finetune cannot be trained; choose one of hyper, mend" in wrong.err


def test_a_decoder_gets_an_editor(tmp_path: Path, run: Callable[..., Any]) -> None:
    """With the preset, whose multiplier is constant, made small for a test."""
    model = tiny.build("llama")
    model.save(tmp_path / "model")
    data = write_revisions(tmp_path / "data.jsonl", model, 40)
    settings = "edits=4 rows=4 editor.rank=8 validations=1 validation_edits=2 validation_inputs=2 final_edits=2"
    small = [word for setting in settings.split() for word in ("--set", setting)]
    options = ["--model", tmp_path / "model", "--train", data, "--output", tmp_path / "run", "--config", "mend"]
    result = run("train", *options, *small, "--steps", 3, "--device", "cpu", "--json").json
    assert result["steps"] == 3
    editor = load_editor(tmp_path / "run")
    assert isinstance(editor, Mend)
    assert editor.config.rate == 1e-5
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert record["kl_multiplier"] == 10.0
