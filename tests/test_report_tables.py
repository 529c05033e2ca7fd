"""The tables of reports: labels, numbers, what is bold, and new metrics."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import results
import tiny
from rich.console import Console
from samples import revisions

from factpatch.cli.report import report
from factpatch.data.revisions import editable
from factpatch.editors import METHODS, GradientStep
from factpatch.editors.registry import Method
from factpatch.evaluation import evaluate
from factpatch.metrics import METRICS, Metric, percent
from factpatch.report import main_table, read_runs, terminal_table
from factpatch.report.spreadsheets import joint_numbers, raw_numbers
from factpatch.report.tables import latex, latex_text, markdown


def hand_made(folder: Path) -> list[Path]:
    """Three runs with round numbers; the second wins some columns, ties in one and has a null."""
    none = dict.fromkeys(results.METRICS) | {"intervals": {}, "kl_worst": None, "edits": 20, "retain_inputs": 1000}
    first = {"success": 1.0, "retain": 0.9, "equivalence": 0.5, "deterioration": 0.0225, "kl_mean": 0.25}
    first["intervals"] = {"success": [0.95, 1.0], "deterioration": [-0.001, 0.05]}
    second = {"success": 0.9996, "retain": 0.98765, "equivalence": 0.75, "equivalence_human": 0.5}
    second |= {"deterioration": -0.002, "kl_mean": 0.00012}
    write = results.write_evaluation
    return [
        write(folder / "a", "finetune", bare=True, layers="bert.encoder.layer.0", result=none | first),
        write(folder / "b", "zhu", bare=True, bound=0.0005, result=none | second),
        write(folder / "c_1", "hyper", "answer", bare=True, loop=5, result=none | {"retain": 1.0}),
    ]


def test_the_table_by_hand(tmp_path: Path) -> None:
    runs, _ = read_runs(hand_made(tmp_path))
    lines = markdown(main_table(runs)).splitlines()
    assert lines[0] == "### Fact-checking: bert, 110M parameters (runs/classify)"
    assert lines[4:6] == [
        "| Fine-tune, bert.encoder.layer.0 | **100.0** [95.0, 100.0] | 90.00 | 50.0 | **2.25** [−0.10, 5.00] | 0.25 "
        "| 20 × 1,000 |",
        "| Zhu et al., all, m = 5e-4 | **100.0** | **98.77** | **75.0** / 50.0 | **−0.20** | 1.2e-4 | 20 × 1,000 |",
    ]
    assert lines[7] == "### Question answering: bart, 139M parameters (runs/answer)"
    assert lines[11] == "| KnowledgeEditor + loop | - | 100.00 | - | - | - | 20 × 1,000 |"


def test_optional_metrics_have_a_column_where_a_run_has_them(tmp_path: Path) -> None:
    folders = hand_made(tmp_path)
    more = {"forced_success": 0.875, "retain_neighbours": 0.5, "intervals": {}}
    folders.append(results.write_evaluation(tmp_path / "d", "gradient", "answer", bare=True, result=more))
    shown = markdown(main_table(read_runs(folders)[0])).splitlines()
    assert "| Retain, neighbours, % ↑ | Forced success, % ↑ | Mean KL ↓ |" in shown[2]
    assert "Forced equivalence" not in shown[2]
    assert "| - | - | 0.25 |" in shown[4]
    assert any("| 50.0 | 87.5 |" in line for line in shown if line.startswith("| Gradient, all |"))


def test_latex(tmp_path: Path) -> None:
    runs, _ = read_runs(hand_made(tmp_path))
    lines = latex(main_table(runs)).splitlines()
    assert lines[1:3] == [r"\begin{tabular}{>{\raggedright\arraybackslash}p{0.24\linewidth}rrrrrr}", r"\toprule"]
    assert lines[3:5] == [
        r"Method & Success & Retain & Equivalence & Deterioration & Mean KL & Edits $\times$ \\",
        r" & \% $\uparrow$ & \% $\uparrow$ & \% $\uparrow$ & \% $\downarrow$ & $\downarrow$ & inputs \\",
    ]
    title = r"\textit{Fact-checking: bert, 110M parameters (runs/classify)}"
    assert lines[5:11] == [
        r"\midrule",
        rf"\multicolumn{{7}}{{p{{0.95\linewidth}}}}{{{title}}} \\",
        r"\addlinespace",
        r"Fine-tune, bert.encoder.layer.0 & \textbf{100.0} & 90.00 & 50.0 & \textbf{2.25} & 0.25 "
        r"& 20 $\times$ 1,000 \\",
        r" & {\scriptsize {[}95.0, 100.0]} &  &  & {\scriptsize {[}$-$0.10, 5.00]} &  &  \\",
        r"Zhu et al., all, m = $5 \cdot 10^{-4}$ & \textbf{100.0} & \textbf{98.77} & \textbf{75.0} / 50.0 & "
        r"\textbf{$-$0.20} & $1.2 \cdot 10^{-4}$ & 20 $\times$ 1,000 \\",
    ]
    assert latex_text("m = 1e-4") == "m = $10^{-4}$"
    assert lines[-4:-2] == [r"\bottomrule", r"\end{tabular}"]
    assert latex_text(r"50 % of a_b & $c# {d}~^\e") == (
        r"50 \% of a\_b \& \$c\# \{d\}\textasciitilde{}\textasciicircum{}\textbackslash{}e"
    )


def test_raw_numbers(tmp_path: Path) -> None:
    runs, _ = read_runs(hand_made(tmp_path)[::-1])
    rows = list(csv.DictReader(raw_numbers(runs).splitlines()))
    assert [row["run"] for row in rows] == ["b", "a", "c_1"], "fact-checking first, else in the order given"
    assert rows[0]["model"] == "bert, 110M parameters (runs/classify)"
    assert (rows[0]["success"], rows[0]["success_low"], rows[0]["kl_mean"]) == ("0.9996", "", "0.00012")
    assert (rows[1]["deterioration_low"], rows[1]["method"]) == ("-0.001", "Fine-tune, bert.encoder.layer.0")
    assert (rows[2]["success"], rows[2]["retain_inputs"]) == ("", "1000")


def test_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(hand_made(tmp_path), tmp_path / "out", None, 0, False)
    said = capsys.readouterr().out
    for shown in ("Fact-checking:", "Question answering:", "bert.encoder.layer.0", "98.77", "−0.20", "1.2e-4", "1,000"):
        assert shown in said
    assert max(map(len, said.split(str(tmp_path), 1)[0].splitlines())) <= 80
    assert str(tmp_path / "out" / "dirichlet.svg") in said


def test_many_metrics_fit_the_terminal_without_broken_words(tmp_path: Path) -> None:
    rates = dict.fromkeys(("success", "retain", "equivalence", "forced_success", "forced_equivalence"), 1.0)
    result = {**rates, "equivalence_human": None, "intervals": {key: [0.4386, 1.0] for key in rates}}
    folder = results.write_evaluation(tmp_path / "run", "hyper", "answer", bare=True, result=result)
    printed = io.StringIO()
    Console(file=printed, width=80).print(terminal_table(main_table(read_runs([folder])[0])))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {"Success", "Retain", "Forced", "KnowledgeEditor", "[43.86,", "100.00]", "[43.9,", "1,000"} <= words


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([results.write_training(tmp_path / "run")], tmp_path / "out", None, 0, True)
    said = json.loads(capsys.readouterr().out)
    assert (said["runs"], said["seconds"] > 0) == (1, True)
    assert said["files"] == [str(tmp_path / "out" / name) for name in ("curves-run.png", "curves-run.svg")]


def test_labels_that_coincide_are_told_apart(tmp_path: Path) -> None:
    folders = [results.write_evaluation(tmp_path / place / "dev", bare=True) for place in ("a", "b")]
    folders += [results.write_evaluation(tmp_path / "qa", "hyper", "answer", bare=True), folders[0]]
    runs, _ = read_runs(folders)
    first, second, third = [run.label for run in runs]
    assert (first, second) == ("KnowledgeEditor (a-dev)", f"KnowledgeEditor ({runs[1].name})")
    assert runs[1].name.endswith("b-dev")
    assert third == "KnowledgeEditor", "of another task"


def rates(folder: Path, name: str, **about: Any) -> Path:
    result = dict.fromkeys(results.METRICS) | {"intervals": {}, "edits": 20, "retain_inputs": 1000}
    return results.write_evaluation(folder / name, "finetune", bare=True, result=result | about.pop("result"), **about)


def bold(runs: list[Path], column: int) -> list[bool]:
    (section,) = main_table(read_runs(runs)[0])
    return [line.cells[column][0].best for line in section.lines]


def test_lost_accuracy_below_zero_is_not_better_than_none(tmp_path: Path) -> None:
    runs = [rates(tmp_path, n, result={"deterioration": d}) for n, d in (("a", -0.03), ("b", 0.0), ("c", 0.02))]
    assert bold(runs, 3) == [True, True, False]


def test_runs_that_intervals_do_not_set_apart_are_bold_together(tmp_path: Path) -> None:
    runs = [
        rates(tmp_path, "a", result={"success": 0.97, "intervals": {"success": [0.94, 0.99]}}),
        rates(tmp_path, "b", result={"success": 0.95, "intervals": {"success": [0.92, 0.98]}}),
        rates(tmp_path, "c", result={"success": 0.80, "intervals": {"success": [0.75, 0.85]}}),
    ]
    assert bold(runs, 0) == [True, True, False]


@pytest.mark.parametrize(
    ("unequal", "name"),
    [
        ({"precision": "bfloat16", "result": {}}, "precision"),
        ({"result": {"edits": 100}}, "number of edits"),
        ({"result": {"retain_inputs": 5}}, "number of inputs"),
        ({"revisions": "other", "result": {}}, "data"),
        ({"targets": "gold", "result": {}}, "kind of targets"),
    ],
)
def test_unequal_conditions_are_never_ranked(tmp_path: Path, unequal: dict[str, Any], name: str) -> None:
    runs = [rates(tmp_path, "a", result={"success": 0.5})]
    result = {"success": 0.9} | unequal.pop("result")
    runs.append(rates(tmp_path, "b", result=result, **unequal))
    assert bold(runs, 0) == [False, False]
    shown = markdown(main_table(read_runs(runs)[0]))
    assert f"Nothing is bold, because the runs differ in {name}." in shown
    assert not unequal or "revisions" in unequal or name in shown
    assert (", gold targets" in shown) == ("targets" in unequal)


def test_runs_that_differ_in_merging_only_are_told_apart_by_it(tmp_path: Path) -> None:
    curve = {"curve": results.plausible_curve()}
    folders = [results.write_evaluation(tmp_path / m, bare=True, merge=m, result=curve) for m in ("sum", "solve")]
    runs, _ = read_runs(folders)
    assert [run.label for run in runs] == ["KnowledgeEditor, merged by sum", "KnowledgeEditor, merged by solve"]
    rows = list(csv.DictReader(joint_numbers(runs).splitlines()))
    assert [(row["merge"], row["facts"]) for row in rows[3:5]] == [("sum", "256"), ("solve", "1")]


def test_a_failed_edit_is_marked_as_failed(tmp_path: Path) -> None:
    folder = results.spoil(
        results.write_evaluation(tmp_path / "a") / "examples.json", '"a": "SUPPORTS"', '"a": "REFUTES"'
    )
    report([results.write_evaluation(tmp_path / "b"), folder], tmp_path / "out", None, 0, True)
    failed, succeeded = ((tmp_path / "out" / f"beams-{name}.svg").read_text() for name in ("a", "b"))
    assert "(THE EDIT FAILED: the first answer is not the target)" in failed
    assert "(the edit succeeded)" in succeeded


def test_results_of_other_models_stand_apart(tmp_path: Path) -> None:
    runs = [rates(tmp_path, n, model=f"runs/{n}", result={"success": 0.5}) for n in ("a", "b")]
    assert [len(section.lines) for section in main_table(read_runs(runs)[0])] == [1, 1]


def test_a_method_that_is_not_registered_has_its_own_name(tmp_path: Path) -> None:
    folder = results.spoil(results.write_evaluation(tmp_path / "a", bare=True) / "summary.json", '"hyper"', '"rome"')
    (run,), _ = read_runs([folder])
    assert run.label == "rome, all"


def test_a_registered_method_has_its_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "rome", Method("ROME (Meng et al.)", "nowhere:ROME"))
    folder = results.spoil(results.write_evaluation(tmp_path / "a", bare=True) / "summary.json", '"hyper"', '"rome"')
    (run,), _ = read_runs([folder])
    assert run.label == "ROME (Meng et al.), all"


def test_results_without_a_version_still_load(tmp_path: Path) -> None:
    """Their mean KL left out the predictions that had flipped, so it is not shown beside those of today."""
    folder = results.write_evaluation(tmp_path / "old", bare=True)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("version", "model_kind", "precision"):
        del summary[key]
    results.write_json(folder / "summary.json", summary)
    (run,), _ = read_runs([folder])
    assert run.result.metrics["success"] == 0.99
    assert run.result.metrics["kl_mean"] is None
    assert main_table([run])[0].title == "Fact-checking: runs/classify"


def test_a_metric_is_added_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then appears in the summary, in summary.json, and in the report's tables."""
    shouted = Metric(
        "Shouted",
        "Shout",
        "edits that the model answers in capitals",
        {"shouted": lambda seen: seen.answer.isupper()},
        interval="share",
        show=percent(1),
        unit="%",
    )
    monkeypatch.setitem(METRICS, "shouted", shouted)
    model = tiny.build("bert")
    known = editable(model, revisions(model, 6))
    result = evaluate(GradientStep(), model, known, known, tmp_path / "run", {})
    assert result is not None
    assert result.metrics["shouted"] == 1.0, "labels are in capitals"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["result"]["shouted"] == 1.0
    runs, _ = read_runs([tmp_path / "run"])
    table = markdown(main_table(runs))
    assert "| Shouted, % ↑ |" in table
    assert "| 100.0 [61.0, 100.0] |" in table
    (row,) = csv.DictReader(raw_numbers(runs).splitlines())
    assert (row["shouted"], row["shouted_high"]) == ("1.0", "1.0")
