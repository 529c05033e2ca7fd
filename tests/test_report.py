"""The report: tables compared with hand-made ones, comparisons of methods, and readable figures."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import results
import tiny
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from safetensors.numpy import save_file
from samples import revisions

from factpatch.cli.report import report
from factpatch.data.revisions import editable
from factpatch.editors import METHODS, GradientStep
from factpatch.editors.registry import Method
from factpatch.errors import FactpatchError, FileError, InputError
from factpatch.evaluation import evaluate
from factpatch.metrics import METRICS, Metric, percent
from factpatch.report import contests, list_figures, main_table, read_runs
from factpatch.report.canvas import STYLE
from factpatch.report.compare import cosines, grid, position, weigh
from factpatch.report.spreadsheets import joint_numbers, raw_numbers
from factpatch.report.tables import latex, latex_text, markdown

FIGURES = {
    "logits-ke": [
        "Fact-checking: bert, 110M parameters (runs/classify)",
        "log-odds of the original prediction, before",
        "(retain over all 500 edits: 98.12 %)",
        "unchanged score",
    ],
    "logits-qa": ["mean log-probability of the original answer, after"],
    "magnitudes": [
        "Root mean square change of each weight, relative to the method's largest",
        "unchanged by this method",
        "no such weight in this layer",
        *(
            "Gradient, all",
            "Fine-tune, bert.encoder.layer.0",
            "query",
            "output.dense",
            "encoder_attn.k_proj",
            "decoder 5",
        ),
    ],
    "cosines": ["Gradient, all [1]", "KnowledgeEditor [3]", "1.000"],
    "dirichlet": ["Distribution of the weighted score", "Share of weightings under which the row"],
    "together": ["Facts edited together in one model (bars: 95 % intervals)", "Success", "256"],
    "beams-ke": ["Edited input", "Paraphrase", "Unrelated input", "SUPPORTS"],
    "beams-qa": ["Windhoek", "Moscow"],
    "curves-kl": ["success", "retain", "equivalence", "edit loss", "KL", "KL's margin", "KL's multiplier", "step"],
    "curves-plain": ["edit loss", "step"],
    "curves-compare": ["kl", "plain", "success, %", "retain, %", "equivalence, %"],
}
TABLES = ["table.md", "table.tex", "table.csv", "together.csv", "dirichlet.csv"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    found = [
        results.write_evaluation(home / "gradient", "gradient"),
        results.write_evaluation(home / "finetune", "finetune", layers="bert.encoder.layer.0"),
        results.write_evaluation(home / "ke"),
        results.write_evaluation(
            home / "qa",
            "hyper",
            "answer",
            merge="sum",
            together=[1, 16, 64, 256],
            result={"curve": results.plausible_curve()},
        ),
        results.write_training(home / "kl"),
        results.write_training(home / "plain", constraint=None),
    ]
    for folder in found[:2]:
        (folder / "examples.json").unlink()
    return found


@pytest.fixture(scope="module")
def output(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "report"
    report(runs, folder, None, 0, True)
    return folder


def test_all_files_and_no_others(output: Path) -> None:
    logits = [f"logits-{name}.{kind}" for name in ("gradient", "finetune") for kind in ("png", "svg")]
    figures = [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
    assert {file.name for file in output.iterdir()} == {*TABLES, *logits, *figures}


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_large_enough_not_blank_and_whole(output: Path, name: str) -> None:
    picture = imread(output / f"{name}.png")[..., :3]  # (height, width, colours)
    assert picture.shape[1] > 400
    assert picture.shape[0] > 200
    shades = np.unique((picture[::2, ::2] * 255).astype(int) @ [65536, 256, 1])
    assert len(shades) > 50
    assert (picture.min(-1) < 0.9).mean() > 0.01, "ink"
    frame = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    assert (frame == 1).all(), "nothing is cut off at the edge"


@pytest.mark.parametrize("name", FIGURES)
def test_a_drawing_holds_its_labels(output: Path, name: str) -> None:
    tree = ET.parse(output / f"{name}.svg")
    texts = {"".join(node.itertext()).strip() for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert set(FIGURES[name]) <= texts


def test_the_same_runs_give_the_same_files(runs: list[Path], output: Path, tmp_path: Path) -> None:
    report(runs[2:3], tmp_path, None, 0, True)
    for name in ("logits-ke.png", "logits-ke.svg", "beams-ke.svg"):
        assert (tmp_path / name).read_bytes() == (output / name).read_bytes()


def overlapping_texts(figure: Any) -> list[tuple[str, str]]:
    """Pairs of texts of which one covers a part of the other, and texts that stick out of the figure."""
    canvas = FigureCanvasAgg(figure)
    with pytest.MonkeyPatch.context() as patch:
        drawn: list[Text] = []
        draw = Text.draw
        patch.setattr(Text, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer)))
        canvas.draw()
    texts = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer()).padded(-1)) for text in texts]
    width, height = canvas.get_width_height()
    out = [(a, "") for a, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    edges = np.array([box.extents for _, box in boxes])
    apart = (edges[:, None, :2] >= edges[:, 2:]).any(-1)  # (texts, texts) left of it or below it
    pairs = np.argwhere(np.tril(~(apart | apart.T), -1))
    return out + [(boxes[i][0], boxes[j][0]) for i, j in pairs]


def test_no_text_covers_another(tmp_path: Path) -> None:
    """With many methods, long names, and texts that do not fit."""
    long = "a_run-with-a-rather-long-name-as-people-write-them"
    folders = [
        results.write_evaluation(tmp_path / "zhu", "zhu", "answer", layers="model.decoder.layers.5"),
        results.write_evaluation(tmp_path / long, "hyper", "answer", loop=5),
        results.write_evaluation(tmp_path / "loop", "hyper", "answer", loop=5),
        *(results.write_evaluation(tmp_path / f"fc{i}", "finetune") for i in range(7)),
        results.write_training(tmp_path / "lp", constraint="lp"),
        results.write_training(tmp_path / "another-run-with-a-long-name"),
    ]
    texts = {
        "W" * 300: ["W" * 300] * 5,
        "costs $5 or $6 " * 40: ["$5 and $6", "x_1 $", "\n"],
        "首都 " * 90: ["東京" * 60],
    }
    rows = [
        {"kind": kind, "text": text, "before": said, "after": said[::-1]}
        for kind, (text, said) in zip(("input", "paraphrase", "unrelated"), texts.items(), strict=True)
    ]
    results.write_json(
        tmp_path / long / "examples.json", [{"edit": {"x": "x", "y": "y", "a": "W" * 300}, "rows": rows}]
    )
    evaluations, trainings = read_runs(folders)
    drawings = list_figures(evaluations, trainings, contests(evaluations, 0))
    shown = [f"logits-{long}", f"beams-{long}", "magnitudes", "cosines", "dirichlet", "curves-lp", "curves-compare"]
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        assert {name: overlapping_texts(drawings[name]()) for name in shown} == {name: [] for name in shown}


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


def test_runs_that_differ_in_merging_only_are_told_apart_by_it(tmp_path: Path) -> None:
    curve = {"curve": results.plausible_curve()}
    folders = [results.write_evaluation(tmp_path / m, bare=True, merge=m, result=curve) for m in ("sum", "solve")]
    runs, _ = read_runs(folders)
    assert [run.label for run in runs] == ["KnowledgeEditor, merged by sum", "KnowledgeEditor, merged by solve"]
    rows = list(csv.DictReader(joint_numbers(runs).splitlines()))
    assert [(row["merge"], row["facts"]) for row in rows[3:5]] == [("sum", "256"), ("solve", "1")]


def test_a_failed_edit_is_marked_as_failed(tmp_path: Path) -> None:
    folder = spoil(evaluated(tmp_path / "a") / "examples.json", '"a": "SUPPORTS"', '"a": "REFUTES"')
    report([evaluated(tmp_path / "b"), folder], tmp_path / "out", None, 0, True)
    failed, succeeded = ((tmp_path / "out" / f"beams-{name}.svg").read_text() for name in ("a", "b"))
    assert "(THE EDIT FAILED: the first answer is not the target)" in failed
    assert "(the edit succeeded)" in succeeded


def test_results_of_other_models_stand_apart(tmp_path: Path) -> None:
    runs = [rates(tmp_path, n, model=f"runs/{n}", result={"success": 0.5}) for n in ("a", "b")]
    assert [len(section.lines) for section in main_table(read_runs(runs)[0])] == [1, 1]


def test_a_method_that_is_not_registered_has_its_own_name(tmp_path: Path) -> None:
    folder = spoil(results.write_evaluation(tmp_path / "a", bare=True) / "summary.json", '"hyper"', '"rome"')
    (run,), _ = read_runs([folder])
    assert run.label == "rome, all"


def test_a_registered_method_has_its_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "rome", Method("ROME (Meng et al.)", "nowhere:ROME"))
    folder = spoil(results.write_evaluation(tmp_path / "a", bare=True) / "summary.json", '"hyper"', '"rome"')
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


def sketched(folder: Path, sketches: dict[str, list[float]], **about: Any) -> Path:
    results.write_evaluation(folder, bare=True, **about)
    array = np.array(list(sketches.values()), np.float32)
    save_file({"sketches": array}, folder / "details.safetensors", {"edits": json.dumps(list(sketches))})
    return folder


def test_cosines_over_shared_edits(tmp_path: Path) -> None:
    folders = [
        sketched(tmp_path / "a", {"1": [1, 0], "2": [1, 1], "3": [0, 2]}),
        sketched(tmp_path / "b", {"2": [2, 2], "1": [0, -3], "4": [5, 5]}),
        sketched(tmp_path / "c", {"1": [0, 0], "3": [0, -1]}),
        sketched(tmp_path / "d", {"1": [1, 0]}, model="another", fingerprint="f"),
        sketched(tmp_path / "e", {"1": [2, 0]}, model="its other name", fingerprint="f"),
    ]
    runs, _ = read_runs(folders)
    found = cosines(runs)
    assert np.diag(found) == pytest.approx(1)
    assert found[3, 4] == pytest.approx(1), "one model, whatever its folder is called"
    assert found[0, 1] == found[1, 0] == pytest.approx(0.5), "of edit 1 it is 0, of edit 2 it is 1"
    assert found[0, 2] == pytest.approx(-1), "an update of nothing has no direction"
    assert np.isnan([found[1, 2], found[0, 3]]).all(), "no edits, or no weights, in common"


def test_wins_under_random_weights() -> None:
    scores = np.array([[0.9, 0.8, 0.7], [0.8, 0.7, 0.6], [0.9, 0.8, 0.7], [1.0, 0.8, 0.6]])
    totals, wins = weigh(scores, seed=3)
    assert wins[0, 1] == 1, "better in all three"
    assert wins[1, 0] == 0
    assert wins[0, 2] == 0.5, "equal"
    assert wins[0, 3] == pytest.approx(0.5, abs=0.02), "a tenth more in one, a tenth less in another"
    assert wins + wins.T == pytest.approx(np.ones((4, 4)))
    assert totals[0].mean() == pytest.approx(0.8, abs=2e-3)
    assert (weigh(scores, seed=3)[0] == totals).all()


def test_the_position_of_a_weight() -> None:
    assert vars(position("model.decoder.layers.1.fc1")) == {"stack": "decoder", "block": 1, "kind": "fc1"}
    assert vars(position("bert.encoder.layer.3.output.dense.weight"))["kind"] == "output.dense"
    assert vars(position("encoder.block.0.layer.1.DenseReluDense.wi"))["kind"] == "layer.1.DenseReluDense.wi"
    assert vars(position("transformer.h.7.mlp.c_fc")) == {"stack": "transformer.h", "block": 7, "kind": "mlp.c_fc"}
    assert vars(position("lm_head"))["block"] is None


def test_a_grid_of_weights() -> None:
    found = grid(dict.fromkeys(["m.decoder.layers.0.cross.k", *results.bart_weights(11)], 1.0))
    assert found.rows[:2] + found.rows[10:12] == ["encoder 0", "encoder 1", "encoder 10", "decoder 0"]
    assert found.stacks == [11]
    assert {"k", "self_attn.k_proj", "fc1"} <= set(found.columns)
    assert np.isnan(found.values[0, found.columns.index("encoder_attn.k_proj")])
    bert = grid(dict.fromkeys(results.bert_weights(2), 1.0))
    assert bert.rows == ["0", "1"]
    assert bert.columns == ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]


def spoil(path: Path, old: str, new: str) -> Path:
    path.write_text(path.read_text().replace(old, new))
    return path.parent


def a_model(folder: Path) -> Path:
    """A fine-tuned model, which has a config and metrics too."""
    results.write_json(folder / "config.json", {"model_type": "bert"})
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def evaluated(folder: Path) -> Path:
    return results.write_evaluation(folder)


WRONG = {
    "nothing": (lambda f: f, "expected the output folder of factpatch evaluate .* found nothing; check the path"),
    "a file": (lambda f: evaluated(f) / "summary.json", "expected the output folder .* found a file"),
    "a model": (a_model, "expected the output folder .* found other files"),
    "a cut summary": (
        lambda f: spoil(evaluated(f) / "summary.json", '"layers": "all"', '"layers": '),
        "summary.json is not valid JSON .*with a new --output folder",
    ),
    "a list": (lambda f: spoil(evaluated(f) / "summary.json", "{", "["), "summary.json is not valid JSON"),
    "a newer version": (
        lambda f: results.write_evaluation(f, version=99),
        r"written by a newer factpatch \(format 99, this one reads up to 1\); upgrade factpatch",
    ),
    "no task": (
        lambda f: spoil(evaluated(f) / "summary.json", '"task"', '"tusk"'),
        'expected a text in "task", found null',
    ),
    "no result": (
        lambda f: spoil(evaluated(f) / "summary.json", '"result"', '"r"'),
        'an object in "result", found null',
    ),
    "a word": (
        lambda f: spoil(evaluated(f) / "summary.json", '"retain": 0.9812', '"retain": "high"'),
        'a number or null in "retain", found "high"',
    ),
    "odd intervals": (
        lambda f: results.write_evaluation(f, result={"intervals": {"retain": 3}}),
        r"expected \[low, high\] for each metric",
    ),
    "cut metrics": (
        lambda f: spoil(results.write_training(f) / "metrics.jsonl", '"step": 150', '"step": '),
        "metrics.jsonl, line 3 is not valid JSON",
    ),
    "no step": (
        lambda f: spoil(results.write_training(f) / "metrics.jsonl", '"step": 100', '"step": null'),
        'metrics.jsonl, line 2: expected an object with a number in "step"',
    ),
    "no validation": (lambda f: results.write_training(f, 0), "has no validations yet"),
    "odd examples": (
        lambda f: spoil(evaluated(f) / "examples.json", '"edit"', '"e"'),
        r'examples.json: expected a list of \{"edit", "rows"\}',
    ),
    "an odd kind": (
        lambda f: spoil(evaluated(f) / "examples.json", '"unrelated"', '"other"'),
        'expected one of input, paraphrase, unrelated in "kind", found "other"',
    ),
    "an odd answer": (
        lambda f: spoil(evaluated(f) / "examples.json", '"REFUTES"', "5"),
        'examples.json: expected a list of texts in "before"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders(tmp_path: Path, case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(InputError, match=message) as caught:
        report([make(tmp_path / "run")], tmp_path / "out", None, 0, True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_damaged_details(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "run")
    (folder / "details.safetensors").write_bytes(b"no tensors")
    with pytest.raises(
        FileError, match=r"details.safetensors cannot be read .*remove it to report without its figures"
    ):
        read_runs([folder])
    save_file({"magnitudes": np.ones(3, np.float32)}, folder / "details.safetensors", {"weights": '["a"]'})
    with pytest.raises(FileError, match=r"details\.safetensors"):
        read_runs([folder])


def test_an_output_that_is_a_file(tmp_path: Path, runs: list[Path]) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileError, match="cannot write"):
        report(runs, tmp_path / "out", None, 0, True)
    assert (tmp_path / "out").read_text() == "mine"


def test_without_matplotlib(tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FactpatchError, match=r"pip install 'factpatch\[plots\]'"):
        report(runs, tmp_path / "out", None, 0, True)
    assert not (tmp_path / "out").exists()


def test_the_recorded_run_is_drawn(tmp_path: Path) -> None:
    """docs/results/runs/fc.jsonl, as training wrote it."""
    folder = results.write_training(tmp_path / "fc")
    recorded = Path(__file__).parent.parent / "docs" / "results" / "runs" / "fc.jsonl"
    shutil.copy(recorded, folder / "metrics.jsonl")
    report([folder], tmp_path / "out", None, 0, True)
    assert imread(tmp_path / "out" / "curves-fc.png").shape[1] > 400
