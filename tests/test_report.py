"""The files that a report writes: complete, readable and reproducible tables and figures."""

from __future__ import annotations

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

from factpatch.cli.report import report
from factpatch.errors import FactpatchError, FileError
from factpatch.report import contests, list_figures, read_runs
from factpatch.report.canvas import STYLE

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


def test_control_characters_in_labels_do_not_break_svg(tmp_path: Path) -> None:
    from xml.etree import ElementTree

    from factpatch.report.canvas import new_figure, write_figures

    def draw():
        figure = new_figure(2)
        figure.subplots().set_title("a\x1bb\x00c\x07")
        return figure

    write_figures({"one": draw}, tmp_path)
    ElementTree.parse(tmp_path / "one.svg")
