"""The benchmark measures what it says: the reference computes the same edit as the engine."""

from __future__ import annotations

import pytest
import tiny
import torch
from conftest import loud_editor

from factpatch import bench
from factpatch.bench.shapes import ANSWER_TOKENS
from factpatch.bench.ways import propose_and_run, published_step, published_way
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.training import TrainConfig
from factpatch.training.objective import Objective


@torch.no_grad()
def test_the_published_way_gives_the_same_outputs(model: TaskModel, edits: list[FactEdit]) -> None:
    if model.model.config.model_type == "gpt2":
        pytest.skip("its weights are stored the other way round, which the benchmark's shapes are not")
    editor = loud_editor(model)
    batch = editor.batch(model, edits[:1])
    found = propose_and_run(editor, model, batch, batch.rows)
    expected = published_way(editor, model, batch, batch.rows)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None and not p.requires_grad for p in model.model.parameters())


def test_bench_reports_every_key() -> None:
    model = tiny.build("bart", vocab_size=20_000)
    times = bench.bench_edit(model, edits=3, rows=2, tokens=5, repeats=1)
    summary = times.summary(edits=3)
    for key in (
        "edits_per_second",
        "reference_edits_per_second",
        "speedup",
        "limit_edits_per_second",
        "fraction_of_limit",
    ):
        assert summary[key] > 0
    # Six tokens' rank at most, in every one of the editable weights, for three edits in float32.
    values = sum(sum(layer.weight.shape) for layer in model.layers.values())
    assert 0 < summary["factor_bytes"] <= 3 * (ANSWER_TOKENS + 1) * values * 4


def test_factors_of_128_bert_base_edits_stay_below_1_5_gb() -> None:
    """Counted, not allocated: rank tokens + 1 in each of the 72 weights."""
    from transformers import BertConfig, BertForSequenceClassification

    from factpatch.models import editable_layers

    with torch.device("meta"):
        layers = editable_layers(BertForSequenceClassification(BertConfig()))
    assert 128 * (32 + 1) * sum(sum(layer.weight.shape) for layer in layers.values()) * 2 <= 1.5e9


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_a_training_step_and_what_it_is_measured_by(name: str) -> None:
    """The reference's gradients are those of the step that trains, for the same edit."""
    model = tiny.build(name, vocab_size=20_000)
    times = bench.bench_train(model, edits=2, rows=4, tokens=5, repeats=1)
    summary = times.summary(edits=2)
    for key in ("edits_per_second", "reference_edits_per_second", "speedup", "limit_edits_per_second"):
        assert summary[key] > 0
    assert all(parameter.grad is None for parameter in model.model.parameters())

    editor = loud_editor(model)
    batch = bench.random_step(model, 1, 4, 5)
    kept = bench.kept_features(model, batch)
    still = torch.optim.SGD(editor.parameters(), lr=0.0)
    published_step(editor, model, batch, kept, still)
    theirs = {name: p.grad.clone() for name, p in editor.named_parameters() if p.grad is not None}
    editor.zero_grad()
    measured = Objective(model, TrainConfig(edits=1, rows=4), kept)(editor, batch)
    (measured.loss + measured.constraints.sum()).backward()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for key, parameter in editor.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[key], rtol=1e-2, atol=1e-3 * float(largest))


def test_rows_under_patches() -> None:
    found = bench.bench_evaluate(tiny.build("bert", vocab_size=20_000), edits=2, rows=3, tokens=5, repeats=1)
    assert (found["fraction_of_limit"] or 0) > 0
    assert (found["rows_per_second"] or 0) > 0
