"""Fuzzing of data, settings and results: whatever a file contains, its reader returns or raises one of our own errors.

`make fuzz` tries 100,000 files; a usual test run only a few hundred.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import DEEP, JSON, OURS, TENSORS, VALUES, changed, damages, fuzzed, only_our_errors, st, write_changed
from results import plausible_curve, write_evaluation, write_training
from safetensors import safe_open
from safetensors.torch import load_file

from factpatch.data.records import read_records
from factpatch.data.revisions import read_revisions
from factpatch.evaluation.summary import Summary
from factpatch.facts import read_edits
from factpatch.report import contests, list_figures, main_table, read_runs, terminal_table, write_figures, write_tables
from factpatch.resumable import ResumableLines
from factpatch.training.config import resolve_config

LINES = st.lists(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20), max_size=5)


@pytest.mark.parametrize(
    "read",
    [read_edits, lambda path: list(read_records(path)), lambda path: list(read_revisions(path))],
    ids=["edits", "records", "revisions"],
)
@fuzzed(lines=LINES, packed=st.booleans(), damage=st.none() | damages())
def test_lines(part: int, read: Callable[[Path], Any], lines: list[bytes], packed: bool, damage: Any) -> None:
    content = b"\n".join(lines)
    content = gzip.compress(content) if packed else content
    with only_our_errors() as folder:
        path = folder / ("file.jsonl.gz" if packed else "file.jsonl")
        path.write_bytes(damage(content) if damage else content)
        read(path)


@fuzzed(lines=st.lists(st.sampled_from(["steps", "lr", "editor.width", "x"]), max_size=4), value=VALUES)
def test_configs(part: int, lines: list[str], value: Any) -> None:
    text = "\n".join(f"{key} = {json.dumps(value)}" for key in lines).encode(errors="surrogatepass")
    with only_our_errors() as folder:
        (folder / "file.toml").write_bytes(text)
        resolve_config(None, folder / "file.toml", [f"{key}={value}" for key in lines], {})


@fuzzed(lines=st.lists(st.binary(max_size=30)), cut=st.floats(0, 1))
def test_part_files(part: int, lines: list[bytes], cut: float) -> None:
    """A part file with other content is replaced or resumed; the finished file has only complete lines."""
    with only_our_errors() as folder:
        first = ResumableLines(folder / "out", {})
        first.write(["{}"])
        content = (folder / ".out.part").read_bytes()
        (folder / ".out.part").write_bytes(content[: int(cut * len(content) * 2)] + b"\n".join(lines))
        (folder / ".out.part.seconds").write_bytes(lines[0] if lines else b"")
        again = ResumableLines(folder / "out", {})
        again.write(["{}"])
        again.finish()
        assert (folder / "out").read_bytes() == b"{}\n" * (again.done + 1)


# Results


@fuzzed(value=JSON, whole=st.booleans())
def test_results(part: int, value: str, whole: bool) -> None:
    known = f'{{"version": 1, "task": "classify", "method": "hyper", "result": {value}}}' if whole else value
    with only_our_errors() as folder:
        (folder / "summary.json").write_text(known, errors="surrogatepass")
        Summary.read(folder)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result folders as `report` reads them."""
    folder = tmp_path_factory.mktemp("reported")
    write_evaluation(folder / "one", result={"curve": plausible_curve()}, together=[1, 16])
    write_evaluation(folder / "two", method="finetune")
    write_training(folder / "training", 4)
    return folder


def report(runs: Path, output: Path, draw: bool) -> None:
    evaluations, trainings = read_runs(sorted(runs.iterdir()))
    table, compared = main_table(evaluations), contests(evaluations, 0)
    terminal_table(table)
    write_tables(table, evaluations, compared, output)
    figures = list_figures(evaluations, trainings, compared)
    write_figures(figures if draw else {}, output)


FILES = ["one/summary.json", "one/examples.json", "training/metrics.jsonl", "training/config.json"]


@fuzzed(file=st.sampled_from(FILES), number=OURS, new=VALUES, text=st.none() | DEEP, draw=OURS)
def test_reports(part: int, reported: Path, file: str, number: int, new: Any, text: str | None, draw: int) -> None:
    with only_our_errors() as folder:
        shutil.copytree(reported, folder / "runs")
        path = folder / "runs" / file
        lines = [json.loads(line) for line in path.read_text().splitlines()] if file.endswith("l") else None
        found = changed(json.loads(path.read_text()) if lines is None else lines, number, new)
        written = [found] if lines is None or not isinstance(found, list) else found
        path.write_text(text or "\n".join(map(json.dumps, written)))
        report(folder / "runs", folder / "report", draw == 777)


@fuzzed(number=OURS, new=st.none() | TENSORS | JSON, damage=st.none() | damages(), draw=OURS)
def test_details(part: int, reported: Path, number: int, new: Any, damage: Any, draw: int) -> None:
    with only_our_errors() as folder:
        shutil.copytree(reported, folder / "runs")
        path = folder / "runs" / "one" / "details.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        write_changed(path, load_file(path), metadata, number, new)
        if damage:
            path.write_bytes(damage(path.read_bytes()))
        report(folder / "runs", folder / "report", draw == 777)
