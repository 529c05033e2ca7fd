"""Training an editor: what it learns, what it keeps, its options, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import PartialState
from conftest import Ran, assert_untouched, weights_of
from processes import Stopped
from samples import answerer, fact_checker, read_lines, write_revisions
from training_runs import QUICK, SMALL, editor_weights, start

from factpatch.data.revisions import Revision
from factpatch.editors import load_editor
from factpatch.editors.trainable import matching_shapes
from factpatch.errors import FileError, InputError, MismatchError, TrainingError
from factpatch.evaluation import measure, predicted_now
from factpatch.models import TaskModel, load_model
from factpatch.processes import accelerator_on
from factpatch.training import Train, TrainConfig
from factpatch.training.run import within_error_of_best
from factpatch.training.train import Status

# What is learnt and saved


def test_edits_succeed_after_training(checker: Path, claims: Path, tmp_path: Path) -> None:
    config = replace(QUICK, steps=60, edits=16, validations=6, validation_edits=6, lr=2e-3)
    seen: list[Status] = []
    result = start(config, checker, tmp_path / "run").run(claims, watch=seen.append)
    assert result["success"] > 0.8
    assert result.keys() >= {"success", "retain", "equivalence", "equivalence_human", "deterioration", "edits"}
    assert result.keys() >= {"retain_inputs", "seconds", "steps", "edits_per_second", "margin"}
    assert (result["steps"], result["edits"], result["revisions"], result["bad"]) == (60, 6, 54, 0)
    assert result["trained"] is False, "60 steps are too few"
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"kl", "kl_margin", "kl_multiplier", "success", "retain", "gradient_norm"} <= lines[0].keys()
    assert seen[-1].share == 1.0
    assert seen[-1].step == 60
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json",
        "editor",
        "last",
        "metrics.jsonl",
    ]
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["result"] == result
    assert about["config"]["editor"]["width"] == 32


def test_scores_that_cannot_be_told_apart() -> None:
    assert within_error_of_best(0.0, [], 100)
    assert within_error_of_best(0.77, [0.5, 0.8], 100)  # the error of 0.8 is 0.04
    assert not within_error_of_best(0.75, [0.5, 0.8], 100)
    assert within_error_of_best(0.75, [0.5, 0.8], 100, errors=2)
    assert within_error_of_best(0.99, [1.0], 100)  # a perfect score of a sample has its error too
    assert not within_error_of_best(0.97, [1.0], 100)


def test_several_updates_are_validated_as_a_loop(
    checker: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods: list[Any] = []

    def watched(method: Any, *rest: Any) -> Any:
        methods.append(method)
        return measure(method, *rest)

    monkeypatch.setattr("factpatch.training.validation.measure", watched)
    start(replace(QUICK, updates=2), checker, tmp_path / "run").run(claims)
    assert {method.updates for method in methods} == {2}


@pytest.mark.parametrize("kl_over", ["top1", "beam"])
def test_answers_are_trained_on(tmp_path: Path, kl_over: str) -> None:
    folder = answerer(tmp_path / "answerer")
    data = write_revisions(tmp_path / "data.jsonl", load_model(folder, "cpu"), 40)
    result = start(replace(QUICK, kl_over=kl_over, rows=12), folder, tmp_path / "run").run(data)
    assert result["steps"] == QUICK.steps
    assert all(line["kl"] >= -1e-6 for line in read_lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize(("folder", "dtype"), [(answerer, torch.float32), (fact_checker, torch.bfloat16)])
def test_validations_are_as_precise_as_evaluation(
    folder: Callable[[Path], Path], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for training in bf16, too, and the answers before editing are made in the same precision."""
    asked: set[torch.dtype] = set()
    products: set[str] = set()

    def predicted(model: TaskModel, revisions: list[Revision]) -> Any:
        if len(revisions) == 4:  # the slice that is held out
            products.add(torch.get_float32_matmul_precision())
        return predicted_now(model, revisions)

    def watched(method: Any, model: TaskModel, edits: Any, others: list[Revision], *rest: Any) -> Any:
        asked.add(model.model.dtype)
        products.add(torch.get_float32_matmul_precision())
        assert [other.prediction for other in others] == model.predict([other.input for other in others])
        return measure(method, model, edits, others, *rest)

    monkeypatch.setattr("factpatch.training.validation.predicted_now", predicted)
    monkeypatch.setattr("factpatch.training.validation.measure", watched)
    model = folder(tmp_path / "model")
    data = write_revisions(tmp_path / "data.jsonl", load_model(model, "cpu"), 40)
    run = start(replace(QUICK, precision="bf16"), model, tmp_path / "run")
    run.run(data)
    assert asked == {dtype}
    assert products == {"high"}
    assert run.validator.model.fingerprint == run.model.fingerprint == run.editor.base


def test_the_best_and_the_last_editor_are_kept(
    checker: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best editor has the highest success + retain on held-out revisions; equivalence does not count."""
    scores = iter([(0.5, 0.5, 1.0), (0.9, 0.8, 0.0), (0.2, 0.1, 1.0), (0.0, 0.0, 0.0)])
    snapshots = []

    def score(self: Train, *_: Any) -> dict[str, Any]:
        snapshots.append({name: tensor.clone() for name, tensor in self.editor.state_dict().items()})
        success, retain, equivalence = next(scores)
        return {"success": success, "retain": retain, "equivalence": equivalence}

    monkeypatch.setattr(Train, "_measure", score)
    result = start(QUICK, checker, tmp_path / "run").run(claims)
    assert result["best_step"] == 8
    for folder, number in (("editor", 1), ("last", 2)):
        kept = editor_weights(tmp_path / "run" / folder)
        assert all(torch.equal(kept[name], tensor) for name, tensor in snapshots[number].items())


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_every_architecture_trains_and_stays_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny.build(name)
    before = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    data = write_revisions(tmp_path / "revisions.jsonl", model, 30)
    config = replace(QUICK, steps=2, validations=1, constraint="both", kl_over="top1", updates=2, precision="fp32")
    result = Train(config, model, tmp_path / "run").run(data)
    assert 0 <= result["success"] <= 1
    assert all(torch.equal(before[key], tensor) for key, tensor in model.model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.model.parameters())
    editor = load_editor(tmp_path / "run" / "editor")
    assert editor.base == model.fingerprint


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_leaves_in_the_precision_it_came_in(
    fails: bool, checker: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checker, "cpu")
    before = weights_of(model)
    seen: list[torch.dtype] = []

    def watch(status: Status) -> None:
        seen.append(model.model.dtype)
        if fails:
            raise Stopped

    run = Train(replace(QUICK, precision="bf16"), model, tmp_path / "run")
    with pytest.raises(Stopped) if fails else nullcontext():
        run.run(claims, watch=watch)
    assert set(seen) == {torch.bfloat16}
    assert_untouched(model, before)


def test_starting_from_a_trained_editor(checker: Path, claims: Path, tmp_path: Path) -> None:
    start(QUICK, checker, tmp_path / "first").run(claims)
    again = Train(QUICK, load_model(checker, "cpu"), tmp_path / "second", init=tmp_path / "first")
    trained = editor_weights(tmp_path / "first" / "editor")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in again.editor.state_dict().items())
    again.run(claims)
    assert json.loads((tmp_path / "second" / "config.json").read_text())["init"]

    def refused(config: TrainConfig, model: Path) -> None:
        Train(config, load_model(model, "cpu"), tmp_path / "third", init=tmp_path / "first")

    with pytest.raises(MismatchError, match="was trained with other editor"):
        refused(replace(QUICK, editor=replace(SMALL, width=16)), checker)
    with pytest.raises(MismatchError, match="edits other weights"):
        refused(replace(QUICK, layers=("*layer.0.*",)), checker)
    with pytest.raises(MismatchError, match="was trained for weights"):
        refused(QUICK, fact_checker(tmp_path / "other", seed=5))
    with pytest.raises(FileError, match="is not an editor's folder"):
        Train(QUICK, load_model(checker, "cpu"), tmp_path / "third", init=tmp_path)


def test_validations_take_a_limited_share_of_the_time(checker: Path, tmp_path: Path) -> None:
    run = start(replace(QUICK, minutes=10, validation_share=0.1), checker, tmp_path / "run")
    assert run._has_time_to_validate(0.01, 0.1), "the first one, of unknown duration"
    run.validation_seconds = run.last_validation = 15.0
    assert not run._has_time_to_validate(0.49, 0.1), "a second one would make 30 s of 294 s"
    assert run._has_time_to_validate(0.51, 0.1)
    assert run._has_time_to_validate(0.1, None)


def test_the_last_measurement_is_fitted_to_the_time(checker: Path, claims: Path, tmp_path: Path) -> None:
    valid = write_revisions(tmp_path / "valid.jsonl", load_model(checker, "cpu"), 40, seed=5)
    run = start(replace(QUICK, steps=1), checker, tmp_path / "run")
    run.run(claims, valid)
    run.config = replace(QUICK, minutes=1)
    run.last_validation = 6.0 / run.validator.relative_cost()
    assert run._final_seconds() == pytest.approx(6.0)
    run.last_validation *= 4
    assert run._final_seconds() == pytest.approx(6.0), "a tenth of a minute"
    assert len(run.validator.final_sample()[0]) == 40
    assert len(run.validator.final_sample(0.25)[0]) == 10
    assert len(run.validator.final_sample(0.0)[0]) == 8


def test_stages_are_reported(checker: Path, claims: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    run = start(replace(QUICK, steps=2, validations=1), checker, tmp_path / "run")
    run.run(claims, on_stage=lambda stage, share: stages.append((stage, share)))
    assert list(dict.fromkeys(stage for stage, _ in stages)) == [
        "predicting held-out answers",
        "running the unedited model on control inputs",
        "validating",
        "measuring the best editor",
    ]
    assert stages[-1][1] == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"constraint": "none"},
        {"constraint": "lp", "p": 1.5},
        {"paraphrases": "none"},
        {"paraphrases": "human", "paraphrase_rows": 2},
        {"optimizer": "adam", "weight_decay": 1e-2, "schedule": "constant", "clip": 0.5},
        {"multiplier_schedule": "linear", "control_pool": 20},
        {"precision": "bf16"},
        {"others": ("unsure",)},
        {"others": ("unsure", "near"), "constraint": "lp"},
        {"others": ("uniform", "unsure", "near"), "ema": 0.5},
        {"ridge": 0.5, "updates": 2},
        {"editor": replace(SMALL, gradients=False)},
        {"editor": replace(SMALL, states=True)},
    ],
    ids=str,
)
def test_options(checker: Path, claims: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = replace(QUICK, **changes)
    run = start(config, checker, tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in run.editor.state_dict().items()}
    result = run.run(claims)
    after = editor_weights(tmp_path / "run" / "last")
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    first = {"kl": config.margin, "both": config.margin, "lp": config.lp_margin, "none": None}[config.constraint]
    annealed = sum(line["success"] > config.anneal_above for line in lines)
    assert result["margin"] == (first and pytest.approx(first * config.margin_factor**annealed))
    assert all((name in lines[0]) == (name in config.constraints) for name in ("kl", "lp"))


def test_control_inputs_that_the_model_is_unsure_of(checker: Path, claims: Path, tmp_path: Path) -> None:
    kls = {}
    for others in ("uniform", "unsure"):
        start(replace(QUICK, others=(others,)), checker, tmp_path / others).run(claims)
        kls[others] = [line["kl"] for line in read_lines(tmp_path / others / "metrics.jsonl")]
    assert kls["uniform"] != kls["unsure"]


def test_averaged_weights_are_validated_and_saved(checker: Path, claims: Path, tmp_path: Path) -> None:
    """Averaging does not influence the steps, and the average is the one that a loop over all steps gives."""
    config = replace(QUICK, validations=1, anneal_above=0.999)
    history: list[dict[str, torch.Tensor]] = []
    plain = start(config, checker, tmp_path / "plain")
    update = plain._update

    def recorded(share: float) -> None:
        update(share)
        history.append({name: p.detach().clone() for name, p in plain.editor.named_parameters()})

    expected = {name: p.detach().clone() for name, p in plain.editor.named_parameters()}
    plain._update = recorded
    plain.run(claims)
    averaging = start(replace(config, ema=0.5), checker, tmp_path / "average")
    averaging.run(claims)
    for step, weights in enumerate(history):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * tensor for name, tensor in weights.items()}
    for folder in ("last", "editor"):  # the only validation is after the last step
        saved = editor_weights(tmp_path / "average" / folder)
        for name, tensor in expected.items():
            torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(expected[name], tensor, rtol=1e-3) for name, tensor in history[-1].items())


def test_some_layers_only(checker: Path, claims: Path, tmp_path: Path) -> None:
    run = start(replace(QUICK, layers=("*layer.0.*",)), checker, tmp_path / "run")
    assert 0 < len(run.editor.shapes) < len(run.model.layers)
    run.run(claims)
    editor = load_editor(tmp_path / "run" / "editor")
    assert all("layer.0." in name for name in editor.shapes)
    assert run.editor.shapes.keys() == matching_shapes(run.model, ("*.layer.0",)).keys()
    assert len(matching_shapes(run.model, ("mlp:1", "*.layer.0.output.dense"))) == 3
    with pytest.raises(InputError, match="no editable weight matches nothing"):
        start(replace(QUICK, layers=("nothing",)), checker, tmp_path / "other")


def test_a_run_after_one_on_another_kind_of_device(checker: Path, claims: Path, tmp_path: Path) -> None:
    """Accelerate remembers the first device of a process and would refuse another one."""
    state = accelerator_on(torch.device("cpu")).state
    PartialState().device = state.device = torch.device("meta")
    result = start(replace(QUICK, steps=2), checker, tmp_path / "run").run(claims)
    assert result["steps"] == 2


def test_a_run_limited_by_minutes(checker: Path, claims: Path, tmp_path: Path) -> None:
    result = start(replace(QUICK, minutes=0.03, steps=100_000), checker, tmp_path / "run").run(claims)
    assert result["seconds"] > 0.9, "at least half of the time"
    assert 1 <= len(read_lines(tmp_path / "run" / "metrics.jsonl")) <= 3


def test_one_validation_per_epoch(checker: Path, claims: Path, tmp_path: Path) -> None:
    """An epoch has as many rows as there are revisions: here 54, in steps of 2 edits with 6 rows."""
    config = replace(QUICK, steps=20, edits=2, validations=100, validate_epochs=True)
    start(config, checker, tmp_path / "run").run(claims)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [5, 9, 14, 18, 20]


# Bad input


def test_minutes_that_are_over_before_the_first_step(checker: Path, claims: Path, tmp_path: Path) -> None:
    assert start(replace(QUICK, minutes=1e-9), checker, tmp_path / "run").run(claims)["steps"] == 1


def test_weights_that_are_not_finite(checker: Path, claims: Path, tmp_path: Path) -> None:
    """The last update can break the weights although the loss before it was finite."""
    with pytest.raises(TrainingError, match="training diverged near step 1: loss or weights are not finite"):
        start(replace(QUICK, steps=1, lr=1e38), checker, tmp_path / "run").run(claims)


def test_a_tracker(checker: Path, claims: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    start(replace(QUICK, steps=4, tracker="tensorboard"), checker, tmp_path / "run").run(claims)
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def test_a_tracker_that_is_not_there(checker: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the tracker 'abacus' is not available"):
        start(replace(QUICK, tracker="abacus"), checker, tmp_path / "run")


def test_a_folder_in_use_and_nothing_to_resume(checker: Path, claims: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nothing to resume"):
        start(QUICK, checker, tmp_path / "run", resume=True)
    start(QUICK, checker, tmp_path / "run").run(claims)
    with pytest.raises(FileError, match="is in use"):
        start(QUICK, checker, tmp_path / "run")


# The commands


def test_train_and_evaluate_from_the_command_line(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text("edits = 6\nrows = 6\nvalidations = 2\n[editor]\nwidth = 32\nbottleneck = 8\nlstm = 8\n")
    common = ["--model", checker, "--device", "cpu", "--json"]
    ran = run("train", *common, "--train", claims, "--output", tmp_path / "run", "--config", toml, "--steps", 4)
    trained = ran.json
    assert trained["trained"] is False
    assert "This editor is not trained yet: it made only 4 steps" in ran.err
    assert trained.keys() >= {"success", "retain", "equivalence", "edits_per_second", "margin", "steps", "seconds"}
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (saved["edits"], saved["holdout"], saved["control_pool"]) == (6, 200, 2000), "ours, then those for a CPU"
    options = ["--editor", tmp_path / "run" / "editor", "--data", claims, "--edits", 7, "--retain", 9]
    found = run("evaluate", *common, *options, "--output", tmp_path / "ev").json
    assert (found["edits"], found["retain_inputs"]) == (7, 9)
    assert found.keys() >= {"success", "retain", "equivalence", "equivalence_human", "deterioration", "seconds"}
    lines = read_lines(tmp_path / "ev" / "edits.jsonl")
    assert sum(line["success"] for line in lines) / 7 == pytest.approx(found["success"])
    looped = run("evaluate", *common, *options, "--loop", "--output", tmp_path / "ev-loop").json
    assert looped["success"] >= found["success"]


def test_bad_options_of_train(checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Ran]) -> None:
    options = ["train", "--model", checker, "--train", claims, "--output", tmp_path / "run", "--device", "cpu"]
    ran = run(*options, "--set", "edits=0", "--set", "colour=red", "--steps", 0)
    assert ran.code == 1
    assert "steps=0 must be above 0" in ran.err
    assert "edits=0 must be above 0" in ran.err
    assert "unknown setting colour" in ran.err
    assert not (tmp_path / "run").exists()
    ran = run(*options, "--config", "paper-xx")
    assert ran.code == 1
    assert "paper-fc" in ran.err
