"""The report: its table by hand, its comparisons, and figures that are there, whole and readable."""

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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from safetensors.numpy import save_file

from factpatch.cli.report import report
from factpatch.errors import FactpatchError, FileError, InputError
from factpatch.report import contests, list_figures, main_table, read_runs
from factpatch.report.canvas import STYLE
from factpatch.report.compare import cosines, grid, place, weigh
from factpatch.report.tables import latex, latex_text, markdown, raw_numbers

FIGURES = {
    "logits-ke": ["Fact-checking, KnowledgeEditor:", "log-odds of the original prediction, before", "unchanged score"],
    "logits-qa": ["mean log-probability of the original answer, after"],
    "magnitudes": [
        "Fact-checking: root mean square change, relative to the method's largest; hatched: unchanged",
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
    "dirichlet": ["Fact-checking: densities of the score", "Probability that the row beats the column"],
    "beams-ke": ["Edited input", "Paraphrase", "Unrelated input", "SUPPORTS"],
    "beams-qa": ["Windhoek", "Moscow"],
    "curves-kl": ["success", "retain", "equivalence", "edit loss", "KL", "KL's margin", "KL's multiplier", "step"],
    "curves-plain": ["edit loss", "step"],
    "curves-compare": ["kl", "plain", "success, %", "retain, %", "equivalence, %"],
}
TABLES = ["table.md", "table.tex", "table.csv", "dirichlet.csv"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    found = [
        results.write_evaluation(home / "gradient", "gradient"),
        results.write_evaluation(home / "finetune", "finetune", layers="bert.encoder.layer.0"),
        results.write_evaluation(home / "ke"),
        results.write_evaluation(home / "qa", "hyper", "answer"),
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
    assert lines[0] == "### Fact-checking"
    assert lines[4:6] == [
        "| Fine-tune, bert.encoder.layer.0 | **100.0** [95.0, 100.0] | 90.00 | 50.0 | 2.25 [−0.10, 5.00] | 0.25 "
        "| 20 × 1,000 |",
        "| Zhu et al., all, m = 5e-4 | **100.0** | **98.77** | **75.0** / 50.0 | **−0.20** | **1.2e-4** | 20 × 1,000 |",
    ]
    assert lines[7] == "### Question answering"
    assert lines[11] == "| KnowledgeEditor + loop | - | 100.00 | - | - | - | 20 × 1,000 |"


def test_latex(tmp_path: Path) -> None:
    runs, _ = read_runs(hand_made(tmp_path))
    lines = latex(main_table(runs)).splitlines()
    assert lines[1:3] == [r"\begin{tabular}{lrrrrrr}", r"\toprule"]
    assert lines[4:8] == [
        r"\midrule",
        r"\multicolumn{7}{l}{\textit{Fact-checking}} \\",
        r"Fine-tune, bert.encoder.layer.0 & \textbf{100.0} {\scriptsize {[}95.0, 100.0]} & 90.00 & 50.0 & "
        r"2.25 {\scriptsize {[}$-$0.10, 5.00]} & 0.25 & 20 $\times$ 1,000 \\",
        r"Zhu et al., all, m = 5e-4 & \textbf{100.0} & \textbf{98.77} & \textbf{75.0} / 50.0 & "
        r"\textbf{$-$0.20} & \textbf{1.2e-4} & 20 $\times$ 1,000 \\",
    ]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert latex_text(r"50 % of a_b & $c# {d}~^\e") == (
        r"50 \% of a\_b \& \$c\# \{d\}\textasciitilde{}\textasciicircum{}\textbackslash{}e"
    )


def test_raw_numbers(tmp_path: Path) -> None:
    runs, _ = read_runs(hand_made(tmp_path)[::-1])
    rows = list(csv.DictReader(raw_numbers(runs).splitlines()))
    assert [row["run"] for row in rows] == ["b", "a", "c_1"], "fact-checking first, else in the order given"
    assert (rows[0]["success"], rows[0]["success_low"], rows[0]["kl_mean"]) == ("0.9996", "", "0.00012")
    assert (rows[1]["deterioration_low"], rows[1]["method"]) == ("-0.001", "Fine-tune, bert.encoder.layer.0")
    assert (rows[2]["success"], rows[2]["retain_inputs"]) == ("", "1000")


def test_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(hand_made(tmp_path), tmp_path / "out", None, 0, False)
    said = capsys.readouterr().out
    for shown in ("Fact-checking", "Question answering", "bert.encoder.layer.0", "98.77", "−0.20", "1.2e-4", "1,000"):
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


def test_where_a_weight_stands() -> None:
    assert vars(place("model.decoder.layers.1.fc1")) == {"stack": "decoder", "block": 1, "kind": "fc1"}
    assert vars(place("bert.encoder.layer.3.output.dense.weight"))["kind"] == "output.dense"
    assert vars(place("encoder.block.0.layer.1.DenseReluDense.wi"))["kind"] == "layer.1.DenseReluDense.wi"
    assert vars(place("transformer.h.7.mlp.c_fc")) == {"stack": "transformer.h", "block": 7, "kind": "mlp.c_fc"}
    assert vars(place("lm_head"))["block"] is None


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
    "nothing": (lambda f: f, "expected a folder written by factpatch evaluate .* found nothing; name such a folder"),
    "a file": (lambda f: evaluated(f) / "summary.json", "expected a folder .* found a file"),
    "a model": (a_model, "expected a folder .* found other files"),
    "a cut summary": (
        lambda f: spoil(evaluated(f) / "summary.json", '"layers": "all"', '"layers": '),
        "summary.json, line 3: expected JSON",
    ),
    "a list": (lambda f: spoil(evaluated(f) / "summary.json", "{", "["), "summary.json, line 2: expected JSON"),
    "another method": (
        lambda f: spoil(evaluated(f) / "summary.json", '"hyper"', '"rome"'),
        'expected one of hyper, finetune, zhu, gradient in "method", found "rome"',
    ),
    "no task": (lambda f: spoil(evaluated(f) / "summary.json", '"task"', '"tusk"'), 'classify, answer in "task"'),
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
        "metrics.jsonl, line 3: expected JSON",
    ),
    "no step": (
        lambda f: spoil(results.write_training(f) / "metrics.jsonl", '"step": 100', '"step": null'),
        'metrics.jsonl, line 2: expected an object with a number in "step"',
    ),
    "no validation": (lambda f: results.write_training(f, 0), "expected a line for each validation, found none"),
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
        FileError, match=r"details.safetensors: expected the details of an evaluation, found .*evaluate"
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
    with pytest.raises(FactpatchError, match=r"with its extra plots"):
        report(runs, tmp_path / "out", None, 0, True)
    assert not (tmp_path / "out").exists()


def test_the_recorded_run_is_drawn(tmp_path: Path) -> None:
    """docs/results/runs/fc.jsonl, as training wrote it."""
    folder = results.write_training(tmp_path / "fc")
    recorded = Path(__file__).parent.parent / "docs" / "results" / "runs" / "fc.jsonl"
    shutil.copy(recorded, folder / "metrics.jsonl")
    report([folder], tmp_path / "out", None, 0, True)
    assert imread(tmp_path / "out" / "curves-fc.png").shape[1] > 400
