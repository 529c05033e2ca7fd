"""`make results`: experiments are run in steps that resume and are skipped, and their tables go into the pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from experiments import SUMMARY, TOY, Bench, experiment, result_pages, results

from factpatch.errors import FileError, InputError


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


EDITORS = ["editor-0", "editor-1", "editor-2"]
ROWS = ["dev-editor-0", "dev-editor-1", "dev-editor-2"]


def test_steps_run_after_what_they_need_with_the_best_settings(bench: Bench) -> None:
    assert bench.run() == 0
    assert bench.outputs[0] == "model"
    assert set(bench.outputs) == {"model", "tune-1e-3", "tune-1e-4", *EDITORS, *ROWS, "dev-finetune", "report"}
    assert bench.outputs[-1] == "report"
    commands = dict(zip(bench.outputs, bench.commands, strict=True))
    assert "margin_floor=1e-4" in commands["editor-1"]
    assert commands["editor-1"][-3:] == ["--seed", "1", "--json"]
    assert commands["dev-editor-2"][-2] == str(bench.folder / "runs/toy/editor-2")
    assert commands["report"][1:5] == [str(bench.folder / "runs/toy" / name) for name in [*ROWS, "dev-finetune"]]


def test_a_metric_that_no_candidate_has_is_left_out_of_the_choice(bench: Bench) -> None:
    bench.write(
        "experiments/toy.toml", TOY.replace('best = "tune"', 'best = "tune"\nby = ["success", "forced_success"]')
    )
    assert bench.run() == 0
    commands = dict(zip(bench.outputs, bench.commands, strict=True))
    assert "margin_floor=1e-4" in commands["editor-1"]
    assert "| floor | success |" in bench.page


def test_a_choice_by_unknown_metrics_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write("experiments/toy.toml", TOY.replace('best = "tune"', 'best = "tune"\nby = ["forced_success"]'))
    assert bench.run() == 1
    assert "the result of toy/tune-1e-3 has no forced_success to choose by" in capsys.readouterr().out


def test_unchanged_steps_are_skipped(bench: Bench) -> None:
    bench.run()
    assert bench.run() == 0
    assert bench.outputs == []


def test_a_changed_file_reruns_what_depends_on_it(bench: Bench) -> None:
    bench.run()
    bench.write("data/dev.jsonl", "other")
    assert bench.run() == 0
    assert bench.outputs[-1] != "report", "the report reads the same results as before"
    assert sorted(bench.outputs) == sorted([*ROWS, "dev-finetune"])


def test_a_changed_command_reruns_only_what_reads_other_output(bench: Bench) -> None:
    bench.run()
    bench.write("experiments/toy.toml", TOY.replace("--method finetune", "--method finetune --layers all"))
    bench.run()
    assert bench.outputs == ["dev-finetune"]


def test_a_raised_version_reruns_a_step_and_other_places_do_not(bench: Bench) -> None:
    bench.run()
    (bench.folder / "data").rename(bench.folder / "moved")
    assert bench.run("--data", str(bench.folder / "moved")) == 0
    assert bench.outputs == []
    (bench.folder / "moved").rename(bench.folder / "data")
    bench.write("experiments/toy.toml", TOY.replace('name = "model"', 'name = "model"\nversion = 2'))
    bench.run()
    assert bench.outputs == ["model"], "its output is the same as before, so that nothing else has to run"


def test_an_error_stops_only_the_steps_that_need_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.failing = "1"  # the seed
    assert bench.run() == 1
    assert set(ROWS) - set(bench.outputs) == {"dev-editor-1"}
    out, err = capsys.readouterr()
    assert "toy/editor-1: failed: out of memory" in out
    assert "toy/dev-editor-1: blocked" in out
    assert "failed: 1, blocked: 2" in err
    assert "| Editor | 91.0 | 98.80 |" in bench.page, "the mean of the other two seeds"
    assert not (bench.folder / "docs/results/runs/toy/dev-editor-1.json").exists()
    bench.failing = None
    assert bench.run() == 0
    assert bench.outputs == ["editor-1", "dev-editor-1", "report"]
    assert bench.commands[0][-2:] == ["--resume", "--json"]
    assert bench.record("editor-1")["resumed"]


class Crowded(Bench):
    """A bench whose first command of the kind that fails finds too little memory, but not when it is run again."""

    def call(self, words: Sequence[str], log: Path) -> str:
        try:
            return super().call(words, log)
        except FileError:
            self.failing = None
            raise


def test_steps_without_memory_are_run_again_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Crowded(tmp_path)
    bench.failing = "1"  # the seed
    assert bench.run("--jobs", "2") == 0
    assert bench.outputs.count("editor-1") == 2
    assert set(ROWS) < set(bench.outputs)
    assert "running the steps that failed again, one at a time" in capsys.readouterr().out


def test_a_result_is_not_shown_after_its_step_has_failed(bench: Bench) -> None:
    bench.run()
    bench.failing = "finetune"
    bench.write("data/dev.jsonl", "other")
    assert bench.run() == 1
    assert "| Fine-tune | not run | 100.00 |" in bench.page


def test_an_interrupted_step_starts_anew_if_its_inputs_have_changed(bench: Bench) -> None:
    bench.failing = "fit"
    assert bench.run() == 1
    assert bench.outputs == ["model"]
    bench.failing = None
    bench.write("data/train.jsonl", "other")
    bench.run()
    assert "--resume" not in bench.commands[0]


def test_a_dry_run_says_what_would_run_and_changes_nothing(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--dry-run") == 0
    assert bench.commands == []
    assert not (bench.folder / "runs").exists()
    shown = capsys.readouterr().out
    assert "toy/model: run: factpatch fit --model models/base --train data/train.jsonl" in shown
    assert "--set margin_floor=FLOOR --seed 1" in shown
    bench.run()
    capsys.readouterr()
    bench.write("data/dev.jsonl", "other")
    bench.run("--dry-run")
    shown = capsys.readouterr().out
    assert "toy/editor-0: unchanged" in shown
    assert "toy/dev-editor-0: resume: factpatch evaluate" not in shown
    assert "toy/dev-editor-0: run: factpatch evaluate" in shown


def test_only_runs_a_step_and_its_needs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--only", "toy/editor-1") == 0
    assert bench.outputs == ["model", "tune-1e-3", "tune-1e-4", "editor-1"]
    assert bench.run("--only", "toy/tune") == 0
    assert bench.outputs == []
    assert bench.run("--only", "tou") == 1
    assert "no experiment or step is called tou" in capsys.readouterr().err
    bench.run("--list")
    assert "toy/dev-editor-2" in capsys.readouterr().out


def test_several_steps_run_at_the_same_time(bench: Bench) -> None:
    assert bench.run("--jobs", "3") == 0
    assert len(bench.outputs) == 11


def test_the_page_shows_means_intervals_and_seeds_beside_the_paper(bench: Bench) -> None:
    bench.run("--pages")
    assert "| Editor | not run | 98.80 | not run | 98.14 |" in bench.page
    bench.run()
    assert "| Method | Success | paper | Retain | paper |" in bench.page
    assert "| Editor | 91.0 | 98.80 | 95.00 | 98.14 |" in bench.page
    assert "| Editor | 95 % interval | [80.0, 100.0] | [90.00, 100.00] |" in bench.page
    assert "| Editor | 3 seeds | 90.0 to 92.0 | 95.00 to 95.00 |" in bench.page
    assert "10 edits × 20 control inputs, float32" in bench.page
    assert "Minutes of training, at most: Editor 2.0." in bench.page
    assert "`tune`, by success + retain; chosen: 1e-4.\n" in bench.page
    assert "| floor | success | retain |\n| --- | ---: | ---: |\n| 1e-3 | 0.900 | 0.950 |" in bench.page
    assert "Prose stays, with `<!-- table toy -->` in it." in bench.page
    assert "# for each seed: 0, 1, 2\n# with the best of tune\nfactpatch train --model runs/toy" in bench.page
    assert str(bench.folder) not in bench.page + json.dumps(bench.record("dev-editor-1"))


def test_a_record_has_machine_date_seed_and_duration(bench: Bench) -> None:
    bench.run()
    record = bench.record("editor-2")
    assert record["seed"] == 2
    assert record["seconds"] >= 0
    assert "CPU cores" in record["machine"]
    assert record["date"].startswith("20")
    assert record["result"]["success"] == pytest.approx(0.97)


def test_rows_that_were_measured_differently_are_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    bench.summary["precision"] = "bfloat16"
    bench.write("experiments/toy.toml", TOY.replace("--method finetune", "--method finetune --precision bf16"))
    assert bench.run() == 1
    assert "the rows Editor and Fine-tune differ in their precision" in capsys.readouterr().err


def test_facts_edited_together_make_a_column_each(tmp_path: Path) -> None:
    table = {"name": "many", "facts": [16, 64], "rows": [{"label": "sum", "step": "sum"}]}
    steps = [experiment.Step("many", "sum", "sum", "evaluate --output $out")]
    many = experiment.Experiment("many", steps, [table])
    plan = experiment.Plan({"many": many}, tmp_path, tmp_path, tmp_path)
    pages = result_pages.Pages(plan, [many], tmp_path)
    assert pages.table(many, table) == "Not run yet: `make results ONLY=many`.\n"
    point = {"facts": 64, "success": 0.5, "retain": 0.25, "equivalence": None}
    record = {
        "result": {"edits": 64, "retain_inputs": 9, "curve": [point]},
        "summary": SUMMARY,
        "identity": {"inputs": {}},
        "date": "2026-11-16T00:00:00",
        "machine": "2 CPU cores",
        "versions": {"torch": "2.13.0"},
    }
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "sum.json").write_text(json.dumps(record), encoding="utf-8")
    assert "| sum | not run | 50.0 / 25.00 / - |" in pages.table(many, table)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("$model ", "$modle ", "no step is called modle"),
        ('name = "tune"', 'name = "editor"', "two steps are called|editor-0"),
        ("each = { floor", "every = { floor", "unknown key every"),
        ("[variables]", '[variables]\nmodel = "x"', "model is a variable and a step"),
        ("[variables]", "[variables", "not valid TOML"),
    ],
)
def test_mistakes_in_an_experiment_are_explained(tmp_path: Path, old: str, new: str, problem: str) -> None:
    (tmp_path / "toy.toml").write_text(TOY.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        experiment.Plan(experiment.read_experiments(tmp_path), tmp_path, tmp_path, tmp_path)


def test_like_takes_over_what_its_tables_need(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text(TOY.replace("$models/base", "$base"), encoding="utf-8")
    other = 'like = "toy"\nvariables = {base = "$models/large"}\n'
    other += '[[tables]]\nname = "large"\nrows = [{label = "Fine-tune", step = "dev-finetune"}]'
    (tmp_path / "large.toml").write_text(other, encoding="utf-8")
    (tmp_path / "toy.toml").write_text(
        TOY.replace("$models/base", "$base").replace("[variables]", '[variables]\nbase = "$models/base"'),
        encoding="utf-8",
    )
    found = experiment.read_experiments(tmp_path)["large"].steps
    assert [step.name for step in found] == ["model", "dev-finetune"]
    assert "$models/large" in found[0].run


def test_a_real_command_is_measured_and_shown(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    bench = Bench(
        tmp_path,
        """
        [[steps]]
        name = "dev"
        each = { layers = ["all", "bert.encoder.layer.0"] }
        run = '''evaluate --model $models/checker --data $data/claims.jsonl --method gradient --layers $layers
            --edits 3 --retain 5 --device cpu --output $out'''

        [[tables]]
        name = "toy"
        columns = ["success", "retain", "deterioration"]
        rows = [{ label = "Gradient", step = "dev", where = { layers = "all" } }]
        """,
    )
    places = ["--data", str(claims.parent), "--models", str(checker.parent)]
    bench.call = lambda words, log: run(*words).out
    assert bench.run(*places) == 0
    assert "bert, " in bench.page
    assert "3 edits × 5 control inputs, float32" in bench.page
    assert bench.record("dev-all")["summary"]["model"] == "data/checker"  # data and models lie in one folder here
    bench.call = lambda words, log: pytest.fail("nothing has changed")
    assert bench.run(*places) == 0


def test_a_failing_process_reports_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"exit status 2: .*log"):
        results.call_factpatch(["evaluate", "--edits", "few"], tmp_path / "log")


def test_docstrings_and_comments_are_not_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    hashes = []
    for text in ('"""A."""\nx = 1\n', '"""B."""\nx = 1  # why\n', '"""B."""\nx = 2\n'):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / "a.py").write_text(text, encoding="utf-8")
        results.code_hash.cache_clear()
        hashes.append(results.code_hash())
    results.code_hash.cache_clear()
    assert hashes[0] == hashes[1] != hashes[2]
