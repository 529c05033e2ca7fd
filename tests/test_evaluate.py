"""The evaluate command: every method, the files it writes, and runs that are killed, resumed and shared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Ran, assert_untouched, loud_editor, weights_of
from processes import run_in_two_processes
from safetensors import safe_open
from safetensors.torch import load_file
from samples import answerer, fact_checker, read_lines, revisions, write_lines, write_revisions

from factpatch.constraints import kl
from factpatch.data.revisions import Provenance, edit_of, editable
from factpatch.deltas import Dense
from factpatch.editors import HyperNetwork, Zhu, load_editor
from factpatch.errors import FileError
from factpatch.evaluation import evaluate, measuring_precision, predicted_now, sample_edits
from factpatch.evaluation.details import sketches
from factpatch.evaluation.measure import Examiner
from factpatch.metrics import Outcome, intervals
from factpatch.models import Causal, Seq2Seq, TaskModel, load_model
from factpatch.patch import stack_patches

KEYS = {"success", "retain", "equivalence", "equivalence_human", "deterioration", "edits", "retain_inputs", "seconds"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of each task with an editor and a revision file."""
    place = tmp_path_factory.mktemp("world")
    models = {"classify": fact_checker(place / "checker"), "answer": answerer(place / "answerer")}
    found: dict[str, Any] = {}
    for task, folder in models.items():
        model = load_model(folder, "cpu")
        if isinstance(model, Seq2Seq):
            model.limit_answers(5)
            model.model.generation_config = model.generation
            model.save(folder)
        loud_editor(model).save(place / f"{task}-editor")
        data = write_revisions(place / f"{task}.jsonl", model, 24)
        found[task] = {"model": folder, "editor": place / f"{task}-editor", "data": data}
    return found


METHODS = ["--method hyper", "--method finetune", "--method zhu --bound 1e-3", "--method gradient"]
SELECTED = {
    "classify": [
        "--method finetune --layers block --select",
        "--method zhu --select",
        "--method zhu --layers block --select",
    ],
    "answer": ["--method zhu --layers model.encoder.layers.0 --select"],  # trying every block would take long
}


@pytest.mark.parametrize(
    ("task", "options"), [(task, options) for task in SELECTED for options in (*METHODS, *SELECTED[task])]
)
def test_every_method(
    world: dict[str, Any],
    task: str,
    options: str,
    tmp_path: Path,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("factpatch.evaluation.baselines.SELECT_EDITS", 2)
    monkeypatch.setattr("factpatch.evaluation.baselines.SELECT_INPUTS", 4)
    if task == "answer":  # where 20 steps give the same rates as 100, which take long
        monkeypatch.setattr("factpatch.evaluation.baselines.Zhu", partial(Zhu, steps=20))
    files = world[task]
    editor = ["--editor", files["editor"]] if "hyper" in options else []
    common = ["--model", files["model"], "--data", files["data"], "--edits", 5, "--retain", 7, "--device", "cpu"]
    result = run("evaluate", *common, *options.split(), *editor, "--output", tmp_path / "run", "--json").json
    assert result.keys() >= KEYS
    assert (result["edits"], result["retain_inputs"]) == (5, 7)
    assert 0 <= result["kl_mean"] <= result["kl_worst"]
    low, high = result["intervals"]["retain"]
    assert low <= result["retain"] <= high
    lines = read_lines(tmp_path / "run" / "edits.jsonl")
    assert len(lines) == 5
    assert sum(line["success"] for line in lines) / 5 == pytest.approx(result["success"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["task"] == task
    assert summary["method"] == options.split()[1]
    if "--select" in options:
        blocks, bounds = (2 if "block" in options else 0), (5 if "zhu" in options else 0)
        assert len(summary["tried"]) == blocks + bounds
        last = summary["tried"][-(bounds or blocks) :]
        best = max(last, key=lambda one: one["success"] + one["retain"])
        assert (summary["layers"], summary["bound"]) == (best["layers"], best["bound"])
    with safe_open(tmp_path / "run" / "details.safetensors", "pt") as file:
        weights, ids = (json.loads(file.metadata()[key]) for key in ("weights", "edits"))
        assert file.get_tensor("magnitudes").shape == (len(weights),)
        assert file.get_tensor("sketches").shape[0] == len(ids)
        assert len(file.get_tensor("scores_before")) == len(file.get_tensor("changed"))
    example = json.loads((tmp_path / "run" / "examples.json").read_text())[0]
    assert {row["kind"] for row in example["rows"]} - {"paraphrase"} == {"input", "unrelated"}
    assert example["rows"][0]["before"][0] == example["edit"]["y"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "give a trained --editor, or a --method"),
        (["--method", "finetun"], "did you mean finetune?"),
        (["--method", "magic"], "choose one of hyper, mend, finetune"),
        (["--method", "hyper"], "give its folder with --editor"),
        (["--method", "finetune", "--editor", "world"], "leave --editor out"),
        (["--editor", "world", "--layers", "all"], "leave --layers out"),
        (["--method", "zhu"], "either --bound or --select"),
        (["--method", "finetune", "--bound", "1"], "of the method zhu only"),
        (["--method", "finetune", "--layers", "block"], "needs --select"),
        (["--method", "zhu", "--bound", "-1"], "above 0"),
        (["--method", "gradient", "--select"], "--select works with finetune and zhu only"),
        (["--method", "finetune", "--select"], "--layers block"),
        (["--method", "finetune", "--valid", "x.jsonl"], "add --select, or leave --valid out"),
        (["--method", "finetune", "--loop"], "need a trained --editor"),
        (["--method", "prompt", "--ridge", 1], "prompt makes none"),
        (["--method", "finetune", "--together", "1,x"], "expected numbers such as 1,16,64"),
        (["--method", "finetune", "--together", "2", "--merge", "mean"], "'mean' is not one of 'solve', 'scope'"),
        (["--method", "finetune", "--scope", "x"], "only used by --together"),
        (["--method", "finetune", "--together", "2", "--scope", "x"], "only used by --merge scope"),
        (["--method", "finetune", "--together", "2", "--false-matches", "0.1"], "only used by --together with --merge"),
        (["--method", "finetune", "--refine", 1], "only used by --together with --merge solve"),
        (["--method", "ultraedit", "--ridge", 1, "--together", "2", "--merge", "own"], "which has no ridge"),
    ],
)
def test_options_that_do_not_fit(
    world: dict[str, Any], options: list[str], reason: str, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    files = world["classify"]
    ran = run("evaluate", "--model", files["model"], "--data", files["data"], "--output", tmp_path / "run", *options)
    assert ran.code == 2
    assert reason in " ".join(ran.err.replace("│", " ").split())


def test_scores_and_kl(model: TaskModel, editor: HyperNetwork) -> None:
    """Against one edit at a time on materialised weights, one input at a time."""
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(5)
    known = revisions(model, 10)
    edits = editable(model, known)[:3]
    patches = editor.propose(model, [edit_of(revision) for revision in edits])
    examiner = Examiner(model, known, 3, scores=True)
    for patch, examined in zip(patches, examiner.examine(stack_patches(patches, model.layers), edits), strict=True):
        kls = []
        for i, other in enumerate(known):
            encoded = model.encode([other.input])
            answers = model.answers_to_confirm(encoded)  # token by token as it was generated
            targets = model.encode_targets([other.prediction]) if answers is None else [answers[0][1]]
            rows = model.collate(encoded, targets)
            with torch.no_grad():
                before = model.scores(model.features(rows))
                with patch.applied(model):
                    after = model.scores(model.features(rows))
            assert rows.labels is not None
            log_p = after.log_softmax(-1).gather(1, rows.labels.flatten()[:, None]).mean()
            score = torch.logit(log_p.exp(), eps=1e-7) if rows.labels.dim() == 1 else log_p
            assert examined.scores is not None
            assert examined.scores[i] == pytest.approx(score.item(), rel=1e-2, abs=1e-3)
            if other.input != patch.edits[0].x:
                kls.append(kl(before, after).mean().item())
        assert examined.outcome.values["kl_mean"] == pytest.approx(sum(kls) / len(kls), rel=1e-2, abs=1e-5)


def test_sketches_keep_cosines() -> None:
    torch.manual_seed(0)
    shared = torch.randn(40, 30)
    updates = [{"w": Dense(shared + noise * torch.randn(40, 30))} for noise in (0.0, 0.5, 100.0)]
    exact = [
        torch.cosine_similarity(updates[0]["w"].delta.flatten(), u["w"].delta.flatten(), 0).item() for u in updates
    ]
    found = sketches(updates)
    nearly = [torch.cosine_similarity(found[0], sketch, 0).item() for sketch in found]
    assert nearly == pytest.approx(exact, abs=0.1)
    assert sketches([{"v": updates[0]["w"]}])[0].tolist() != found[0].tolist(), "another weight, another projection"


def test_low_rank_and_dense_sketches_agree() -> None:
    model = tiny.build("bert")
    known = editable(model, revisions(model, 2))
    patches = loud_editor(model).propose(model, [edit_of(known[0])])
    dense = {name: Dense(delta.dense()) for name, delta in patches[0].deltas.items()}
    torch.testing.assert_close(sketches([patches[0].deltas])[0], sketches([dense])[0], rtol=1e-3, atol=1e-3)


def test_intervals_hold_the_mean_and_shrink_with_more_edits() -> None:
    def made(count: int) -> list[Outcome]:
        names = ("success", "retain", "equivalence", "equivalence_human", "accuracy_before", "accuracy_after")
        rows = [(i % 2 == 0, 0.9, None, 0.5 + 0.5 * (i % 3 == 0), 0.8, 0.6 + 0.2 * (i % 2)) for i in range(count)]
        return [Outcome(dict(zip(names, row, strict=True))) for row in rows]

    few, many = intervals(made(20)), intervals(made(2000))
    assert few.keys() == {"success", "retain", "equivalence_human", "deterioration"}
    for found in (few, many):
        assert found["success"][0] <= 0.5 <= found["success"][1]
        assert found["retain"] == pytest.approx([0.9, 0.9])
    assert many["success"][1] - many["success"][0] < 0.1 < few["success"][1] - few["success"][0]


class Killed(BaseException):
    pass


def test_a_killed_run_ends_in_the_same_summary(world: dict[str, Any], tmp_path: Path) -> None:
    files = world["classify"]
    model = load_model(files["model"], "cpu")
    editor = load_editor(files["editor"])
    known = [replace(r, id=f"{n}-{r.id}") for n in range(3) for r in revisions(model, 24, seed=n)]
    edits, others = sample_edits(model, known, 70, 9, 0)
    whole = evaluate(editor, model, edits, others, tmp_path / "whole", {"seed": 0})
    done = 0

    def kill(count: int) -> None:
        nonlocal done
        done += count
        if done >= 32:
            raise Killed

    with pytest.raises(Killed):
        evaluate(editor, model, edits, others, tmp_path / "killed", {"seed": 0}, kill)
    part = tmp_path / "killed" / ".edits.jsonl.part"
    part.write_text(
        part.read_text() + part.read_text().splitlines()[0] + "\n" + '{"half'
    )  # as of a kill in the next batch
    seen: list[int] = []
    resumed = evaluate(editor, model, edits, others, tmp_path / "killed", {"seed": 0}, seen.append)
    assert replace(resumed, seconds=0) == replace(whole, seconds=0)
    assert seen == [32, 32, 6]
    for name in ("edits.jsonl", "examples.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ours, theirs = (load_file(tmp_path / run / "details.safetensors") for run in ("killed", "whole"))
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    assert resumed is not None
    assert resumed.seconds


def test_a_run_of_another_editor_starts_anew(world: dict[str, Any], tmp_path: Path) -> None:
    files = world["classify"]
    model = load_model(files["model"], "cpu")
    editor, louder = load_editor(files["editor"]), load_editor(files["editor"])
    for parameter in louder.parameters():
        parameter.data.mul_(1.01)
    edits, others = sample_edits(model, [r for n in range(3) for r in revisions(model, 24, seed=n)], 70, 9, 0)

    def kill(count: int) -> None:
        if count:
            raise Killed

    with pytest.raises(Killed):
        evaluate(editor, model, edits, others, tmp_path / "run", {"seed": 0}, kill)
    seen: list[int] = []
    found = evaluate(louder, model, edits, others, tmp_path / "run", {"seed": 0}, seen.append)
    assert seen == [0, 32, 32, 6]
    assert evaluate(louder, model, edits, others, tmp_path / "run", {"seed": 0}, seen.append) == found, "as it is"
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(FileError, match="different editor_hash"):
        evaluate(editor, model, edits, others, tmp_path / "run", {"seed": 0})
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}


def test_two_processes_write_what_one_writes(
    world: dict[str, Any], tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = world["classify"]
    options = [
        "evaluate",
        "--model",
        files["model"],
        "--editor",
        files["editor"],
        "--data",
        files["data"],
        "--device",
        "cpu",
    ]
    command = tmp_path / "command.py"
    command.write_text(
        "import sys\nimport factpatch.editors.trainable as h\nh.EDITS_PER_BATCH = 5\n"
        "from factpatch.cli import main\nmain(sys.argv[1:])\n"
    )
    arguments = [str(part) for part in [*options, "--output", tmp_path / "two", "--json"]]
    two = json.loads(run_in_two_processes(command, *arguments))
    monkeypatch.setattr("factpatch.editors.trainable.EDITS_PER_BATCH", 5)
    one = run(*options, "--output", tmp_path / "one", "--json").json
    assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in two.items() if k != "seconds"}
    assert (tmp_path / "one" / "edits.jsonl").read_text() == (tmp_path / "two" / "edits.jsonl").read_text()


def test_a_file_of_another_model_is_refused(world: dict[str, Any], tmp_path: Path, run: Callable[..., Ran]) -> None:
    """By its provenance; how many predictions agree does not matter."""
    files = world["classify"]
    model = load_model(files["model"], "cpu")
    for identity, code in ((model.identity, 0), ("another", 1)):
        data = tmp_path / f"{code}.jsonl"
        data.write_text(Provenance(identity, "d", {}).to_json() + "\n" + files["data"].read_text())
        options = ["--model", files["model"], "--editor", files["editor"], "--edits", 2, "--device", "cpu", "--json"]
        ran = run("evaluate", *options, "--data", data, "--output", tmp_path / f"run{code}")
        assert ran.code == code, ran.err
        assert ("was made by model another" in ran.err) == bool(code)


def test_predictions_are_recomputed() -> None:
    """A file without provenance may disagree with the model, which then decides."""
    model = tiny.build("bert")
    known = revisions(model, 9)
    turned = [replace(r, prediction=r.alternatives[0]) for r in known]
    assert predicted_now(model, turned) == known


def test_the_model_leaves_in_the_precision_it_came_in() -> None:
    model = tiny.build("bert")
    before = weights_of(model)
    with measuring_precision(model, "bf16", baseline=False):
        assert model.model.dtype == torch.bfloat16
    assert model.model.dtype == torch.float32
    assert_untouched(model, before)


def test_an_editor_in_a_loop(world: dict[str, Any], tmp_path: Path, run: Callable[..., Ran]) -> None:
    files = world["classify"]
    options = ["--model", files["model"], "--editor", files["editor"], "--data", files["data"], "--device", "cpu"]
    for name, more in {5: ["--loop"], 2: ["--loop", "--max-updates", 2], 1: []}.items():
        folder = tmp_path / str(name)
        result = run("evaluate", *options, "--edits", 4, "--retain", 4, "--output", folder, "--json", *more).json
        assert result["edits"] == 4
        assert json.loads((folder / "summary.json").read_text())["loop"] == name


def test_the_command_explains_its_figures(world: dict[str, Any], tmp_path: Path, run: Callable[..., Ran]) -> None:
    files = world["classify"]
    options = ["--model", files["model"], "--method", "gradient", "--data", files["data"], "--device", "cpu"]
    ran = run("evaluate", *options, "--edits", 6, "--retain", 4, "--together", "1,3", "--output", tmp_path / "run")
    assert ran.code == 0, ran.err
    shown = " ".join(ran.out.replace("│", " ").split())
    for text in (
        "Retain",
        "control inputs whose answer is",
        "3 facts together (2 groups): success",
        "6 edits on 4 control",
    ):
        assert text in shown


def test_a_run_is_known_by_the_content_of_its_files(
    world: dict[str, Any], tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other names for the same files resume a run, and other content under the same name does not."""
    files = world["classify"]
    for name in ("model", "editor"):
        shutil.copytree(files[name], tmp_path / name)
    shutil.copy(files["data"], tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)

    def results(prefix: str) -> Ran:
        given = [value for name in ("model", "editor") for value in (f"--{name}", prefix + name)]
        options = ("--edits", 3, "--retain", 5, "--together", "2", "--device", "cpu", "--json")
        return run("evaluate", *given, "--data", f"{prefix}data.jsonl", "--output", "results", *options)

    first = results("").json
    before = (tmp_path / "results" / "summary.json").read_bytes()
    assert results("./").json == first, "the same time, too: nothing was measured again"
    assert results(f"{tmp_path}/").json == first
    assert (tmp_path / "results" / "summary.json").read_bytes() == before

    lines = read_lines(tmp_path / "data.jsonl")
    write_lines(tmp_path / "data.jsonl", lines[:-1])
    refused = results("")
    assert refused.code == 1
    assert "holds other results (different revisions" in refused.err
