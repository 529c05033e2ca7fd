"""Writes all tables to files, and the numbers behind tables and figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from factpatch.evaluation.summary import Result
from factpatch.files import atomic_file
from factpatch.metrics import METRICS
from factpatch.report.compare import Contest
from factpatch.report.runs import Evaluation, grouped, model_name
from factpatch.report.tables import Section, latex, markdown


def write_tables(
    table: Sequence[Section], runs: Sequence[Evaluation], contests: Sequence[Contest], folder: Path
) -> list[Path]:
    """Writes table.md, table.tex, table.csv, together.csv and dirichlet.csv, each only if it has content."""
    texts: dict[str, str] = {}
    if runs:
        texts |= {"table.md": markdown(table), "table.tex": latex(table), "table.csv": raw_numbers(runs)}
    if any(run.result.curve for run in runs):
        texts["together.csv"] = joint_numbers(runs)
    if contests:
        texts["dirichlet.csv"] = win_shares(contests)
    for name, text in texts.items():
        with atomic_file(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def raw_numbers(runs: Sequence[Evaluation]) -> str:
    """Returns a CSV of rates from 0 to 1 with their intervals; missing values are empty."""
    rows = [[*_about(run), run.name, *_numbers(run.result)] for group in grouped(runs) for run in group.runs]
    return _csv([["task", "model", "method", "run", *_number_titles()], *rows])


def joint_numbers(runs: Sequence[Evaluation]) -> str:
    """Returns a CSV of the same rates for facts that were edited together."""
    rows = [
        [*_about(run), run.conditions.merge, point.facts, point.groups, *_numbers(point.result)]
        for group in grouped(runs)
        for run in group.runs
        for point in run.result.curve
    ]
    return _csv([["task", "model", "method", "merge", "facts", "groups", *_number_titles()], *rows])


def _about(run: Evaluation) -> list[str]:
    return [run.conditions.task, model_name(run.conditions), run.label]


def _number_titles() -> list[str]:
    metrics = [title for key in METRICS for title in (key, f"{key}_low", f"{key}_high")]
    return [*metrics, "edits", "retain_inputs", "seconds"]


def _numbers(result: Result) -> list[float | None]:
    metrics = [n for key in METRICS for n in (result.metrics[key], *result.intervals.get(key, (None, None)))]
    return [*metrics, result.edits, result.retain_inputs, result.seconds]


def win_shares(contests: Sequence[Contest]) -> str:
    """Returns a CSV with the share of random weightings under which one system scores higher than another."""
    rows: list[list[object]] = [["task", "system", "other", "share_of_weightings"]]
    for contest in contests:
        for i, system in enumerate(contest.labels):
            others = [j for j in range(len(contest.labels)) if j != i]
            rows += [[contest.task, system, contest.labels[j], float(contest.wins[i, j])] for j in others]
    return _csv(rows)


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
