"""The benchmark measures what it says: the reference computes the same edit as the engine."""

from __future__ import annotations

import tiny
import torch
from conftest import loud_editor

from factpatch import bench
from factpatch.facts import FactEdit
from factpatch.models import TaskModel


@torch.no_grad()
def test_the_published_way_gives_the_same_outputs(model: TaskModel, edits: list[FactEdit]) -> None:
    if model.model.config.model_type == "gpt2":
        return  # its weights are stored the other way round, which the benchmark's shapes are not
    editor = loud_editor(model)
    batch = editor.batch(model, edits[:1])
    found = bench.propose_and_run(editor, model, batch, batch.rows)
    expected = bench.published_way(editor, model, batch, batch.rows)
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
    assert 0 < summary["factor_bytes"] <= 3 * (bench.ANSWER_TOKENS + 1) * values * 4


def test_factors_of_128_bert_base_edits_stay_below_1_5_gb() -> None:
    """Counted, not allocated: rank tokens + 1 in each of the 72 weights."""
    from transformers import BertConfig, BertForSequenceClassification

    from factpatch.models import editable_layers

    with torch.device("meta"):
        layers = editable_layers(BertForSequenceClassification(BertConfig()))
    assert 128 * (32 + 1) * sum(sum(layer.weight.shape) for layer in layers.values()) * 2 <= 1.5e9
