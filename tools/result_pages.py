"""Writes tables, settings and commands of experiments into the pages of docs, from the records in docs/results/runs.

Marks in a page say where they belong: `<!-- table NAME -->`, `<!-- settings EXPERIMENT -->` or
`<!-- commands EXPERIMENT -->`, each followed by `<!-- end -->`. The text between the two is replaced; all other text
stays.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from experiment import Experiment, Plan, Step

from factpatch.errors import InputError
from factpatch.files import atomic_file
from factpatch.metrics import METRICS

MARKED = re.compile(r"^(<!-- (table|settings|commands) ([\w-]+) -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
CONDITIONS = {
    "fingerprint": "model",
    "precision": "precision",
    "products": "precision of products",
    "revisions": "data",
}
WIDTH = 120  # characters per line
WIDEST = 4  # columns of a table of intervals
NOT_RUN = "not run"
Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of a table: a method, with one record per seed."""

    label: str
    paper: Sequence[float | None]  # the published figures, by column
    records: list[Record]
    planned: int  # number of seeds

    def results(self, facts: int | None = None) -> list[Record]:
        """Returns the results of all seeds, for single edits or for `facts` facts edited together."""
        found = [record["result"] for record in self.records]
        curves = [{point["facts"]: point for point in result.get("curve", [])} for result in found]
        return found if facts is None else [curve[facts] for curve in curves if facts in curve]


class Pages:
    """The tables of experiments as Markdown."""

    def __init__(self, plan: Plan, experiments: Iterable[Experiment], runs: Path):
        self.plan, self.runs = plan, runs
        self.experiments = {experiment.name: experiment for experiment in experiments}
        self.tables = {table["name"]: (e, table) for e in self.experiments.values() for table in e.tables}

    def content(self, kind: str, name: str) -> str:
        known = self.tables if kind == "table" else self.experiments
        if name not in known:
            raise InputError(f"a page has <!-- {kind} {name} -->, which no experiment defines; correct the page")
        if kind == "table":
            return self.table(*self.tables[name])
        return getattr(self, kind)(self.experiments[name])

    def table(self, experiment: Experiment, table: dict[str, Any]) -> str:
        rows = [self._row(experiment, row) for row in table["rows"]]
        _refuse_unequal(table["name"], rows)
        if not any(row.records or row.paper for row in rows):
            return f"Not run yet: `make results ONLY={experiment.name}`.\n"
        facts: list[int] | None = table.get("facts")
        cells = [_joint_cells(row, facts) if facts else _cells(row, table["columns"]) for row in rows]
        if facts:
            titles = [f"{number:,}" for number in facts]
        else:
            beside = ["paper"] if any(row.paper for row in rows) else []
            titles = [title for key in table["columns"] for title in (METRICS[key].label, *beside)]
            cells = [line[: len(titles)] if beside else line[::2] for line in cells]
        parts = [_grid(["Method", *titles], [[row.label, *line] for row, line in zip(rows, cells, strict=True)])]
        if done := [row for row in rows if row.records]:
            parts += [] if facts else _spread(done, table["columns"])
            parts.append(_folded((_conditions(done) + self._training(done)).split()) + "\n")
        return "\n".join(parts)

    def _row(self, experiment: Experiment, row: dict[str, Any]) -> Row:
        where = row.get("where", {})
        steps = [s for s in experiment.steps if s.group == row["step"] and where.items() <= s.values.items()]
        if not steps:
            raise InputError(
                f"experiment {experiment.name}: a table names the step {row['step']}, which does not exist; correct it"
            )
        found = [record for step in steps if (record := self._record(step.key))]
        return Row(row["label"], row.get("paper", ()), found, len(steps))

    def _record(self, key: str) -> Record:
        path = self.runs / f"{key}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _training(self, rows: Sequence[Row]) -> str:
        """Describes how long the editors of a table were trained, at most; empty if no row has an editor."""
        times = []
        for row in rows:
            read = [self._record(key) for record in row.records for key in record["identity"]["inputs"]]
            trained = [r["result"]["seconds"] / 60 for r in read if r and r["command"].startswith("factpatch train ")]
            times += [f"{row.label} {max(trained):.1f}"] if trained else []
        return f" Minutes of training, at most: {', '.join(times)}." if times else ""

    def settings(self, experiment: Experiment) -> str:
        """Lists the settings that were compared on training data, and their results there."""
        groups = {step.best: step for step in experiment.steps if step.best}
        parts = [self._tried(step, str(name)) for name, step in groups.items()]
        for step in experiment.steps:
            if tried := self._record(step.key).get("summary", {}).get("tried"):
                parts.append(
                    f"`{step.name}`, by `--select`:\n\n{_grid(list(tried[0]), [_texts(one) for one in tried])}"
                )
        return "\n".join(filter(None, parts)) or "Not run yet.\n"

    def _tried(self, step: Step, name: str) -> str:
        tried = [(other, found["result"]) for other in self.plan.tried(step) if (found := self._record(other.key))]
        if not tried:
            return ""
        shown = ("success", "retain", "retain_neighbours", "equivalence", "equivalence_human")
        keys = [key for key in shown if any(result.get(key) is not None for _, result in tried)]
        lines = [[*other.values.values(), *(_rate(result.get(key)) for key in keys)] for other, result in tried]
        best = max(tried, key=lambda pair: sum(pair[1].get(key) or 0 for key in step.by))[0]
        title = f"`{name}`, by {' + '.join(step.by)}; chosen: {', '.join(best.values.values())}."
        return f"{title}\n\n{_grid([*best.values, *keys], lines)}"

    def commands(self, experiment: Experiment) -> str:
        """Lists all commands, with one per group. Values that are still to be chosen are in capitals."""
        groups: dict[str, list[Step]] = {}
        for step in experiment.steps:
            groups.setdefault(step.group, []).append(step)
        return "```\n" + "".join(map(self._command, groups.values())) + "```\n"

    def _command(self, steps: Sequence[Step]) -> str:
        """Returns the command of a group's first step, below comments on the other steps."""
        step = steps[0]
        each = [f"{name}: {', '.join(dict.fromkeys(s.values[name] for s in steps))}" for name in step.values]
        notes = [f"for each {'; '.join(each)}"] if each else []
        notes += [f"with the best of {step.best}"] if step.best else []
        command = self._record(step.key).get("command") or self.plan.shown(step)
        lines = [_folded(["#", *note.split()], "\n#   ") for note in notes]
        return "".join(f"{line}\n" for line in [*lines, _folded(_arguments(command), " \\\n    ")])

    def rewritten(self, text: str) -> str:
        """Returns a page's text with everything between its marks written anew."""
        return MARKED.sub(lambda found: f"{found[1]}\n{self.content(found[2], found[3])}\n{found[4]}", text)


def write_pages(plan: Plan, experiments: Iterable[Experiment], docs: Path) -> None:
    """Rewrites the text between the marks of all pages."""
    pages = Pages(plan, experiments, docs / "results" / "runs")
    for path in sorted(docs.rglob("*.md")):
        old = path.read_text(encoding="utf-8")
        if (new := pages.rewritten(old)) != old:
            with atomic_file(path) as scratch:
                scratch.write_text(new, encoding="utf-8")


def _refuse_unequal(name: str, rows: Sequence[Row]) -> None:
    """Raises an InputError if the records of a table were not measured under equal conditions."""
    found = [(row.label, record) for row in rows for record in row.records]
    for key, what in CONDITIONS.items():
        seen = {json.dumps(record["summary"].get(key)): label for label, record in found}
        if len(seen) > 1:
            one, other = list(seen.values())[:2]
            raise InputError(f"table {name}: the rows {one} and {other} differ in their {what}; run them again")


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Returns, for each column, our mean over seeds and the published figure."""
    published = ["" if value is None else f"{value:.2f}" for value in row.paper] or [""] * len(columns)
    return [text for key, paper in zip(columns, published, strict=True) for text in (_mean(row.results(), key), paper)]


def _joint_cells(row: Row, facts: Sequence[int]) -> list[str]:
    keys = ("success", "retain", "equivalence")
    return [
        " / ".join(_mean(found, key) for key in keys) if (found := row.results(number)) else NOT_RUN for number in facts
    ]


def _mean(results: Sequence[Record], key: str) -> str:
    values = [result[key] for result in results if result.get(key) is not None]
    return METRICS[key].show(mean(values)) if values else "-" if results else NOT_RUN


def _spread(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Returns the 95 % intervals and the range over seeds, in tables that are narrow enough for a page."""
    parts = -(-len(columns) // WIDEST)
    size = -(-len(columns) // parts)
    return [_spread_of(rows, columns[start : start + size]) for start in range(0, len(columns), size)]


def _spread_of(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = []
    for row in rows:
        lines.append([row.label, "95 % interval", *(_interval(row, key) for key in columns)])
        if len(row.records) > 1:
            lines.append([row.label, f"{len(row.records)} seeds", *(_range(row, key) for key in columns)])
    return _grid(["Method", "Spread", *(METRICS[key].label for key in columns)], lines)


def _interval(row: Row, key: str) -> str:
    """Returns the 95 % interval over edits; with several seeds, the means of its bounds."""
    found = [result["intervals"][key] for result in row.results() if key in result["intervals"]]
    return f"[{', '.join(METRICS[key].show(mean(bounds)) for bounds in zip(*found, strict=True))}]" if found else "-"


def _range(row: Row, key: str) -> str:
    values = [result[key] for result in row.results() if result.get(key) is not None]
    return f"{METRICS[key].show(min(values))} to {METRICS[key].show(max(values))}" if values else "-"


def _conditions(rows: Sequence[Row]) -> str:
    """Describes the conditions that all rows of a table have in common."""
    records = [record for row in rows for record in row.records]
    first = records[0]
    dates = sorted({record["date"][:10] for record in records})
    sizes = f"{first['result']['edits']:,} edits × {first['result']['retain_inputs']:,} control inputs"
    machines = " and ".join(sorted({record["machine"] for record in records}))
    versions = " and ".join(sorted({f"torch {r['versions']['torch']}" for r in records}))
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    model, precision = first["summary"]["model_kind"], first["summary"]["precision"]
    fewer = [f"{row.label} {len(row.records)} of {row.planned}" for row in rows if len(row.records) < row.planned]
    seeds = f" Seeds measured so far: {', '.join(fewer)}." if fewer else ""
    return f"Rates in %. All of our rows: {model}, {sizes}, {precision}, {machines}, {versions}, {when}.{seeds}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _texts(values: dict[str, Any]) -> list[str]:
    return [f"{v:.3f}" if isinstance(v, float) and v > 0.01 else "-" if v is None else str(v) for v in values.values()]


def _grid(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in [titles, rule, *lines])


def _folded(parts: Iterable[str], joint: str = "\n") -> str:
    """Joins parts to lines of at most 120 characters."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + len(joint) > WIDTH:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return joint.join(lines)


def _arguments(command: str) -> list[str]:
    """Splits a command into its arguments, each option together with its value."""
    parts: list[str] = []
    for word in shlex.split(command):
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("--"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    return parts
