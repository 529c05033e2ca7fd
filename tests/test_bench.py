"""The benchmarks compare like with like: the reference computes the same edit as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from conftest import loud_editor
from transformers import Qwen2Config, Qwen2ForCausalLM

from factpatch import bench
from factpatch.bench.shapes import ANSWER_TOKENS, _tokenizer, split_step
from factpatch.bench.ways import propose_and_run, published_edit, published_step
from factpatch.facts import FactEdit
from factpatch.models import Causal, TaskModel
from factpatch.training import TrainConfig
from factpatch.training.batcher import StepBatch
from factpatch.training.objective import Objective
from factpatch.training.step import Learner


@torch.no_grad()
def test_the_published_edit_gives_the_same_outputs(model: TaskModel, edits: list[FactEdit]) -> None:
    if model.model.config.model_type == "gpt2":
        pytest.skip("its weights are transposed, unlike those of the benchmark's shapes")
    editor = loud_editor(model)
    batch = editor.batch(model, edits[:1])
    found = propose_and_run(editor, model, batch, batch.rows)
    expected = published_edit(editor, model, batch, batch.rows)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None and not p.requires_grad for p in model.model.parameters())


def test_bench_reports_every_key() -> None:
    model = tiny.build("bart", vocab_size=20_000)
    shares: list[float] = []
    summary: Any = bench.bench_edit(model, edits=3, rows=2, tokens=5, repeats=1, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    for key in (
        "edits_per_second",
        "reference_edits_per_second",
        "speedup",
        "limit_edits_per_second",
        "fraction_of_limit",
    ):
        assert summary[key] > 0
        # On a CPU, also for an allocator that starts anew each time, where the C library allows it.
        assert summary["memory_given_back"] is None or summary["memory_given_back"][key] > 0
    # Six tokens' rank at most, in every one of the editable weights, for three edits in float32.
    values = sum(sum(layer.weight.shape) for layer in model.layers.values())
    assert 0 < summary["factor_bytes"] <= 3 * (ANSWER_TOKENS + 1) * values * 4


@pytest.mark.parametrize("trimmed", [True, False])
def test_the_headline_is_the_steady_state(monkeypatch: pytest.MonkeyPatch, trimmed: bool) -> None:
    """Memory is given back only before the runs that are reported apart, and not at all where that is impossible."""
    events: list[str] = []

    class Library:
        def __init__(self, name: None):
            if trimmed:
                self.malloc_trim = lambda pad: events.append("trim")

    def propose_and_run(*_: object) -> None:
        events.append("batch")

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("factpatch.bench.run.propose_and_run", propose_and_run)
    found = bench.bench_edit(tiny.build("bert", vocab_size=20_000), edits=2, rows=2, tokens=5, repeats=1)
    steady = ["batch"] * 4  # two of the four ways, in two rounds
    again = ["trim", "batch", "trim", "batch", "trim", "trim"] * 2
    assert events == (steady + again if trimmed else steady)
    assert (found["memory_given_back"] is not None) == trimmed


def test_the_tables_name_slow_rates(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "minilm", lambda: tiny.build("bert", vocab_size=20_000))
    rates = dict.fromkeys(["edits_per_second", "one_edit_per_second", "reference_edits_per_second"], 0.4213)
    result = {**rates, "limit_edits_per_second": 4213.0, "factor_bytes": 1}
    monkeypatch.setattr(bench, "bench_edit", lambda *_: {**result, "memory_given_back": result})
    shown = run("bench", "edit", "--shape", "minilm", "--device", "cpu").out
    assert "0.42" in shown
    assert "4,213" in shown
    assert "memory given back" in " ".join(shown.split())
    for command in ("train", "evaluate"):
        sizes = ("--edits", 2, "--rows", 3, "--tokens", 5, "--repeats", 1)
        assert run("bench", command, "--shape", "minilm", "--device", "cpu", *sizes).code == 0


def test_factors_of_128_bert_base_edits_stay_below_1_5_gb() -> None:
    """The factors have rank tokens + 1 in each of the 72 weights; they are counted, not allocated."""
    from transformers import BertConfig, BertForSequenceClassification

    from factpatch.models import editable_layers

    with torch.device("meta"):
        layers = editable_layers(BertForSequenceClassification(BertConfig()))
    assert 128 * (32 + 1) * sum(sum(layer.weight.shape) for layer in layers.values()) * 2 <= 1.5e9


@pytest.mark.parametrize("name", ["bert", "bart", "llama"])
def test_a_training_step_and_what_it_is_measured_by(name: str) -> None:
    """The reference's gradients equal those of a training step with the same edit."""
    model = tiny.build(name, vocab_size=20_000)
    summary: Any = bench.bench_train(model, edits=2, rows=4, tokens=5, repeats=1)
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


def test_an_edit_of_a_decoder_and_an_answer_under_it() -> None:
    found: Any = bench.bench_edit(tiny.build("llama", vocab_size=20_000), edits=2, rows=2, tokens=5, repeats=1)
    assert found["answer_ratio"] == found["edit_and_answer_seconds"] / found["backward_and_answer_seconds"]


def test_the_tokenizer_of_random_models_has_an_end_token() -> None:
    """Qwen's default config names none, and without one a decoder is refused."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1002,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    assert Causal(model, _tokenizer()).end_tokens == [1]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_step_in_parts_has_the_same_gradients(name: str) -> None:
    """Large models run a step in parts, whose gradients are summed."""
    model = tiny.build(name, vocab_size=20_000)
    editor = loud_editor(model)
    whole = bench.random_step(model, 5, 4, 5)
    objective = Objective(model, TrainConfig(edits=5, rows=4), bench.kept_features(model, whole))
    gradients = []
    for parts in (1, 3):
        batches = split_step(whole, 5, parts)
        assert len(batches) == parts
        editor.zero_grad()
        for batch in batches:
            measured = objective(editor, batch)
            (measured.loss + measured.constraints.sum()).backward()
        gradients.append([parameter.grad.clone() for parameter in editor.parameters() if parameter.grad is not None])
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * largest)


def test_a_step_that_does_not_fit_is_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama", vocab_size=20_000)
    rows_at_once = []

    def step(learner: Learner, batches: Sequence[StepBatch]) -> None:
        rows_at_once.append(max(len(rows) for batch in batches for rows in batch.row_groups))
        if rows_at_once[-1] > 3:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Learner, "step", step)
    assert bench.bench_train(model, edits=4, rows=3, tokens=5, repeats=1)["parts"] == 4
    assert rows_at_once[:3] == [12, 6, 3]
