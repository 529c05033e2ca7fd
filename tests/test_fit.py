"""Fine-tuning: what it minimises, its batches, what it learns, its options, and bad input."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Ran
from samples import LABELS, answerer, claims, fact_checker, fever, read_lines, texts, write_lines
from training_runs import QUICK_FIT
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, GenerationConfig

from factpatch.data.holdout import hold_out
from factpatch.data.records import Record
from factpatch.data.revisions import Revision
from factpatch.errors import FileError, InputError, TrainingError
from factpatch.models import Classifier, load_model
from factpatch.training import Fit, FitConfig
from factpatch.training.examples import Example, batches_from, read_answered
from factpatch.training.fit import Status, classifier_losses, summed_loss
from factpatch.training.run import Clock, schedule


def test_facts_held_out_of_a_model_are_held_out_of_its_editor() -> None:
    """They are the same facts even if some are missing from the revision file."""
    records = [Record(str(number), f"claim {number}") for number in range(100)]
    revisions = [Revision(r.id, r.input, "yes", ("no",), (), (), ()) for r in reversed(records[:90])]
    held_out, rest = hold_out(records, 20, seed=0)
    again, _ = hold_out(revisions, 10, seed=0)
    assert {fact.id for fact in again} <= {fact.id for fact in held_out}
    assert sorted(fact.id for fact in held_out + rest) == sorted(record.id for record in records)
    assert hold_out(records, 20, seed=1)[0] != held_out


# What is minimised


def test_classifiers_pay_for_certainty() -> None:
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])
    losses = classifier_losses(probabilities.log() + 3.0, torch.tensor([0, 1]), 0.1)
    entropies = [-sum(p * math.log(p) for p in row) for row in probabilities.tolist()]
    expected = [-math.log(0.7) - 0.1 * entropies[0], -math.log(0.25) - 0.1 * entropies[1]]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_certain_classifier_has_no_entropy_and_no_nan() -> None:
    losses = classifier_losses(torch.tensor([[1000.0, -1000.0]]), torch.tensor([0]), 0.1)
    assert losses.tolist() == [0.0]


@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
def test_answers_are_smoothed_and_padding_counts_nothing(name: str) -> None:
    """Compares with the loss of each answer alone, token by token."""
    model = tiny.build(name)
    questions, answers = ["what is a lake ?", "who leads france ?"], ["gitega", "paris and bujumbura"]
    examples = [Example(*pair) for pair in zip(model.encode(questions), model.encode_targets(answers), strict=True)]
    found = summed_loss(model, examples, FitConfig(task="answer", label_smoothing=0.1))
    expected = 0.0
    for question, answer, example in zip(questions, answers, examples, strict=True):
        log_p = model.logits(model.rows([question], [answer]))[0].log_softmax(-1)  # (tokens, vocabulary)
        for token, scores in zip(example.target, log_p, strict=True):
            expected += -0.9 * float(scores[token]) - 0.1 * float(scores.mean())
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_schedule_rises_and_falls_in_straight_lines() -> None:
    assert [schedule(share, 0.1) for share in (0, 0.05, 0.1, 0.55, 1)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert [schedule(share, 0.0) for share in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])


def test_all_problems_of_the_settings_at_once() -> None:
    with pytest.raises(InputError) as caught:
        FitConfig(task="sing", lr=-1, batch=0, epochs=0, steps=0, minutes=-2.0)
    for problem in ("task=sing", "lr=-1", "batch=0", "epochs=0", "steps=0", "minutes=-2.0"):
        assert problem in str(caught.value)


def test_the_papers_settings_are_the_defaults() -> None:
    config = FitConfig()
    assert (config.max_tokens, config.weight_decay, config.entropy, config.label_smoothing) == (32, 1e-2, 0.1, 0.1)


# Batches


def examples(count: int) -> list[Example]:
    """Examples of unequal lengths; the target is the number of the example."""
    rng = random.Random(0)
    return [Example({"input_ids": [1] * rng.randint(3, 30)}, i) for i in range(count)]


@pytest.mark.parametrize("count", [64, 61, 3])
def test_each_epoch_has_every_example_once(count: int) -> None:
    data = examples(count)
    per_epoch = -(-count // 8)
    batches = list(islice(batches_from(data, 8, 0, 0), 3 * per_epoch))
    epochs = [batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)]
    for epoch in epochs:
        assert sorted(example.target for batch in epoch for example in batch) == list(range(count))
    if count > 8:
        assert epochs[0] != epochs[1]


def test_batches_start_at_any_step() -> None:
    data = examples(50)
    whole = list(islice(batches_from(data, 8, 3, 0), 30))
    for step in (1, 6, 7, 13, 20):
        rest = islice(batches_from(data, 8, 3, step), 30 - step)
        assert list(rest) == whole[step:]
    assert next(batches_from(data, 8, 4, 0)) != whole[0]


def test_batches_have_little_padding() -> None:
    def padding(batches: list[list[Example]]) -> int:
        lengths = [[len(example.encoded["input_ids"]) for example in batch] for batch in batches]
        return sum(max(batch) * len(batch) - sum(batch) for batch in lengths)

    data = examples(400)
    by_length = padding(list(islice(batches_from(data, 8, 0, 0), 50)))
    by_chance = padding([data[i : i + 8] for i in range(0, 400, 8)])
    assert by_length < by_chance / 10


# Learning


def test_a_classifier_learns(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [*claims(200), fever(999, "paris ?", "NOT ENOUGH INFO")])
    dev = write_lines(tmp_path / "dev.jsonl", claims(50, seed=9))
    output = tmp_path / "run"
    seen: list[Status] = []
    result = Fit(FitConfig(**QUICK_FIT), str(base), output, device="cpu").run(train, dev, watch=seen.append)
    assert result["accuracy"] >= 0.96
    assert result["held_out_accuracy"] >= 0.9
    assert (result["records"], result["examples"], result["dev_records"]) == (201, 180, 50)
    assert (result["left_out"], result["bad"], result["steps"]) == (1, 0, 60)
    assert result["seconds"] > 0
    assert [status.step for status in seen] == [10, 20, 30, 40, 50, 60]
    assert seen[-1].share == 1
    assert seen[-1].loss < seen[0].loss

    learnt = AutoModelForSequenceClassification.from_pretrained(output)
    assert learnt.config.id2label == dict(enumerate(LABELS))
    assert learnt.config.label2id == {label: i for i, label in enumerate(LABELS)}
    model = load_model(output, "cpu")
    assert isinstance(model, Classifier)
    assert model.predict(["the capital of france is paris", "where is gitega"]) == ["SUPPORTS", "REFUTES"]

    about = json.loads((output / "fit.json").read_text())
    assert about["config"]["lr"] == QUICK_FIT["lr"]
    assert about["model"] == str(base)
    assert about["result"] == result
    metrics = read_lines(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [10, 20, 30, 40, 50, 60]
    assert max(line["held_out"] for line in metrics) == result["held_out_accuracy"]
    assert not (output / "checkpoint").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    held_out = json.loads((output / "held-out.json").read_text())
    assert held_out["data"] == hashlib.sha256(train.read_bytes()).hexdigest()
    assert held_out["seed"] == 0
    records, _ = read_answered(train, False, LABELS)
    assert held_out["ids"] == [record.id for record in hold_out(records, 20, 0)[0]]


def test_a_model_learns_answers(tmp_path: Path) -> None:
    """The data has two wordings of each question, and the model learns to answer them."""
    places = ["gitega", "paris", "bujumbura", "lake africa", "river europe"]
    kinds = ["capital", "city", "river", "lake", "country", "currency"]
    lines = [
        {
            "id": str(i),
            "input": f"what is {kind} {i % 5 * 'a '}?",
            "output": [place],
            "human_rephrases": [f"{kind} called {i % 5 * 'a '}?"],
        }
        for i, (kind, place) in enumerate((kind, place) for kind in kinds for place in places)
    ]
    train = write_lines(tmp_path / "train.jsonl", lines)
    start = answerer(tmp_path / "base", init_std=0.1, dropout=0.0)
    config = FitConfig(task="answer", lr=5e-3, batch=32, steps=80, warmup=5, validations=2)
    result = Fit(config, str(start), tmp_path / "run", device="cpu").run(train, train)
    assert result["exact_match"] >= 0.9
    assert result["examples"] == 2 * 27
    assert result["held_out_exact_match"] <= 1

    learnt = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    generation = learnt.generation_config
    assert isinstance(generation, GenerationConfig)
    assert (generation.num_beams, generation.do_sample) == (5, False)
    assert generation.max_new_tokens == 4, "two words between <s> and </s>"
    again = load_model(tmp_path / "run", "cpu")
    assert again.predict([line["input"] for line in lines[:4]]) == [line["output"][0] for line in lines[:4]]


def test_the_best_weights_are_kept(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept weights are the latest that are not clearly worse than the best."""
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    scores = iter([0.2, 0.8, 0.8, 0.1])
    snapshots: list[dict[str, torch.Tensor]] = []

    def score(self: Fit, records: Any) -> float:
        snapshots.append({k: v.clone() for k, v in self.model.model.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(Fit, "_score", score)
    config = FitConfig(**{**QUICK_FIT, "steps": 8, "validations": 4})
    result = Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)
    assert (result["best_step"], result["held_out_accuracy"], result["accuracy"]) == (6, 0.8, None)
    kept = load_model(tmp_path / "run", "cpu").model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in snapshots[2].items())
    assert not all(torch.equal(kept[name], tensor) for name, tensor in snapshots[3].items())


def test_many_held_out_facts_are_kept_for_editors_but_not_all_validate(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[int] = []
    monkeypatch.setattr(Fit, "_score", lambda self, records: (validated.append(len(records)), 0.5)[1])
    train = write_lines(tmp_path / "train.jsonl", claims(1200))
    config = FitConfig(**{**QUICK_FIT, "steps": 1, "validations": 1, "holdout": 1100})
    assert Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)["examples"] == 100
    assert validated == [1000]
    assert len(json.loads((tmp_path / "run" / "held-out.json").read_text())["ids"]) == 1100


def test_precision(base: Path, tmp_path: Path) -> None:
    """Products in bf16 change the weights, which stay in float32."""
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    weights: dict[str | None, torch.Tensor] = {}
    for precision in (None, "fp32", "bf16"):
        config = FitConfig(**{**QUICK_FIT, "steps": 3, "precision": precision})
        Fit(config, str(base), tmp_path / str(precision), device="cpu").run(train, None)
        state = load_model(tmp_path / str(precision), "cpu").model.state_dict()
        weights[precision] = next(
            tensor for name, tensor in state.items() if name.endswith("layer.0.output.dense.weight")
        )
    assert weights[None].equal(weights["fp32"])
    assert not weights["bf16"].equal(weights["fp32"])
    assert torch.allclose(weights["bf16"], weights["fp32"], atol=1e-2)
    assert weights["bf16"].dtype == torch.float32
    with pytest.raises(InputError, match="precision=fp8 must be one of fp32, bf16"):
        FitConfig(precision="fp8")


def test_long_claims_are_truncated(base: Path, tmp_path: Path) -> None:
    lines = [fever(i, "paris " * 50, LABELS[i % 2]) for i in range(20)]
    train = write_lines(tmp_path / "train.jsonl", lines)
    for tokens in (32, 64):  # the model itself reads 36
        config = FitConfig(**{**QUICK_FIT, "steps": 2, "max_tokens": tokens})
        result = Fit(config, str(base), tmp_path / f"run-{tokens}", device="cpu").run(train, train)
        assert result["examples"] == 18


def test_a_run_limited_by_minutes(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    config = FitConfig(lr=1e-3, batch=8, minutes=1 / 30, validations=2)
    result = Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)
    assert result["seconds"] > 1
    assert result["steps"] >= 1


def test_minutes_include_set_up_and_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(minutes=1)
    now += 20  # set-up
    clock.start(steps=5)
    assert clock.share(3) == 0
    now += 10
    assert clock.share(3) == pytest.approx(10 / 40)
    clock.reserve = 20
    assert clock.share(3) == pytest.approx(10 / 20)
    assert clock.seconds_left(0.5) == pytest.approx(10 + 20)
    assert (clock.seconds(), clock.training_seconds()) == (30, 10)
    now += 100
    assert clock.share(3) == 1
    resumed = Clock(minutes=1)
    resumed.start(steps=5, earlier=30)
    assert resumed.share(3) == pytest.approx(0.5)
    clock.minutes = 0.1  # over before the first step
    assert clock.share(0) == 1
    assert Clock(minutes=None).minutes is None


# What cannot be trained on


def test_labels_of_dev_that_train_lacks(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(20))
    dev = write_lines(tmp_path / "dev.jsonl", [*claims(3), fever(9, "who leads france ?", "PERHAPS")])
    config = FitConfig(**{**QUICK_FIT, "steps": 2})
    with pytest.raises(
        InputError, match=r"dev.jsonl, line 4: expected one of the labels REFUTES, SUPPORTS, found 'PERHAPS'"
    ):
        Fit(config, str(base), tmp_path / "run", device="cpu").run(train, dev)
    assert not (tmp_path / "run").exists()
    result = Fit(config, str(base), tmp_path / "run", device="cpu").run(train, dev, skip_bad=True)
    assert (result["bad"], result["dev_records"]) == (1, 3)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (claims(9), "expected at least 10 records and more than the 0 that are held out, found 9"),
        ([fever(i, text, "SUPPORTS") for i, text in enumerate(texts(20))], "expected 2 to 100 labels .*, found 1"),
        ([fever(i, text, f"label {i}") for i, text in enumerate(texts(120))], "found 120; for free answers use"),
        ([*claims(20), {"id": "x", "input": "paris"}], 'line 21: expected an answer in "output"'),
        ([*claims(20), fever(3, "paris", "SUPPORTS")], "line 21: two records have the id '3'"),
    ],
)
def test_data_that_cannot_be_learnt(base: Path, tmp_path: Path, lines: list[dict[str, Any]], reason: str) -> None:
    train = write_lines(tmp_path / "train.jsonl", lines)
    with pytest.raises(InputError, match=reason):
        Fit(FitConfig(**QUICK_FIT), str(base), tmp_path / "run", device="cpu").run(train, None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [33, 99])
def test_answers_that_are_longer_than_what_is_generated(tmp_path: Path, words: int) -> None:
    model = answerer(tmp_path / "answerer")
    lines = [{"input": text, "output": [{"answer": "gitega"}]} for text in texts(30)]
    lines[7] = {"input": "who leads france ?", "output": [{"answer": "paris " * words}]}
    train = write_lines(tmp_path / "train.jsonl", lines)
    config = FitConfig(**{**QUICK_FIT, "task": "answer", "steps": 1})
    with pytest.raises(InputError, match="line 8: answers can have 32 tokens, this one has"):
        Fit(config, str(model), tmp_path / "run", device="cpu").run(train, None)
    assert Fit(config, str(model), tmp_path / "run", device="cpu").run(train, None, skip_bad=True)["bad"] == 1


def test_labels_that_are_asked_for(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [*claims(30), fever(99, "paris", "SUPORTS")])
    config = FitConfig(**{**QUICK_FIT, "steps": 1, "labels": ["SUPPORTS", "REFUTES"]})
    with pytest.raises(InputError, match="line 31: expected one of the labels SUPPORTS, REFUTES, found 'SUPORTS'"):
        Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)
    result = Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None, skip_bad=True)
    assert (result["bad"], result["labels"]) == (1, ["REFUTES", "SUPPORTS"])


def test_labels_that_differ_in_case_are_one(base: Path, tmp_path: Path) -> None:
    lines = [fever(i, text, ["SUPPORTS", "REFUTES", "supports"][i % 3]) for i, text in enumerate(texts(30))]
    train = write_lines(tmp_path / "train.jsonl", lines)
    Fit(FitConfig(**{**QUICK_FIT, "steps": 1}), str(base), tmp_path / "run", device="cpu").run(train, None)
    model = load_model(tmp_path / "run", "cpu")
    assert isinstance(model, Classifier)
    assert len(model.labels) == 2


def test_labels_that_differ_in_punctuation(base: Path, tmp_path: Path) -> None:
    lines = [fever(i, text, ["-1", "0", "1"][i % 3]) for i, text in enumerate(texts(30))]
    train = write_lines(tmp_path / "train.jsonl", lines)
    with pytest.raises(InputError, match="labels must differ by more than punctuation, found '-1' and '1'"):
        Fit(FitConfig(**{**QUICK_FIT, "steps": 1}), str(base), tmp_path / "run", device="cpu").run(train, None)


def test_a_classifier_keeps_the_order_of_its_labels(tmp_path: Path) -> None:
    """Otherwise its head would give the opposite of the labels it has learnt."""
    known = fact_checker(tmp_path / "known")
    config = json.loads((known / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "SUPPORTS", "1": "REFUTES"}, {"SUPPORTS": 0, "REFUTES": 1}
    (known / "config.json").write_text(json.dumps(config))
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    still = FitConfig(**{**QUICK_FIT, "steps": 1, "lr": 1e-12})
    result = Fit(still, str(known), tmp_path / "run", device="cpu").run(train, None)
    assert result["labels"] == ["SUPPORTS", "REFUTES"]
    asked = texts(20)
    assert load_model(tmp_path / "run", "cpu").predict(asked) == load_model(known, "cpu").predict(asked)


def test_weights_that_are_not_finite(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    config = FitConfig(**{**QUICK_FIT, "steps": 1, "lr": 1.0, "weight_decay": 1e39})
    with pytest.raises(TrainingError, match=r"diverged near step 1: loss or weights are not finite; start again"):
        Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_folder_in_use_and_nothing_to_resume(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    Fit(FitConfig(), str(base), output)  # an empty folder will do
    (output / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match="run is in use; choose another --output"):
        Fit(FitConfig(), str(base), output)
    with pytest.raises(FileError, match=r"nothing to resume: expected a checkpoint in .*run/checkpoint"):
        Fit(FitConfig(), str(base), output, resume=True)
    with pytest.raises(FileError, match="in use"):
        Fit(FitConfig(), str(base), output / "notes.txt")
    assert (output / "notes.txt").read_text() == "mine"


def test_defaults_suit_the_device(base: Path, tmp_path: Path, run: Callable[..., Ran]) -> None:
    train = write_lines(tmp_path / "train.jsonl", claims(40))
    common = ["fit", "--model", base, "--train", train, "--device", "cpu", "--json", "--steps", 1]
    for name, options, expected in (("default", [], (32, 3.0)), ("given", ["--batch", 16, "--epochs", 7], (16, 7.0))):
        assert run(*common, "--output", tmp_path / name, *options).json["steps"] == 1
        config = json.loads((tmp_path / name / "fit.json").read_text())["config"]
        assert (config["batch"], config["epochs"]) == expected
