"""The main table (Table 1 of De Cao et al., 2021), one row per run: Markdown, LaTeX and terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as TerminalTable

from factpatch.evaluation.summary import Result
from factpatch.metrics import METRICS, Metric
from factpatch.report.compare import differing_conditions
from factpatch.report.runs import Evaluation, Group, grouped

NOTHING = "-"
NOTES = [
    "Equivalence: generated paraphrases / paraphrases written by people.",
    "In brackets: 95 % intervals. Bold: the best value of a column, and those that intervals do not set apart from it.",
]
POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e(-?\d+)\b")
LATEX_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "[": "{[}",  # at the start of a row, LaTeX would read it as an option of the \\ before
    "×": "$\\times$",
    "−": "$-$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
}


@dataclass(frozen=True)
class Number:
    """One number in the table."""

    value: str
    interval: str  # empty where there is none
    best: bool


@dataclass(frozen=True)
class Line:
    """The row of one run."""

    label: str
    cells: list[list[Number]]  # by column; a column has several numbers if metrics share it
    size: str


@dataclass(frozen=True)
class Column:
    """Metrics that are shown side by side."""

    metrics: dict[str, Metric]

    @property
    def first(self) -> Metric:
        return next(iter(self.metrics.values()))

    @property
    def title(self) -> str:
        unit = f", {self.first.unit}" if self.first.unit else ""
        return f"{self.first.label}{unit} {self.first.arrow}"


@dataclass(frozen=True)
class Section:
    """The runs of one task and model."""

    title: str
    columns: list[Column]  # the same in all sections of a table
    lines: list[Line]
    note: str  # why nothing is bold; empty otherwise


def columns_for(runs: Sequence[Evaluation]) -> list[Column]:
    """Returns the columns of the table, from METRICS; optional ones only if a run has a value."""
    shown = {
        key: metric
        for key, metric in METRICS.items()
        if metric.in_tables and (not metric.optional or any(run.result.metrics[key] is not None for run in runs))
    }
    return [
        Column({key: metric, **{k: m for k, m in shown.items() if m.column_of == key}})
        for key, metric in shown.items()
        if metric.column_of is None
    ]


def main_table(runs: Sequence[Evaluation]) -> list[Section]:
    columns = columns_for(runs)
    return [_section(group, columns) for group in grouped(runs)]


def _section(group: Group, columns: list[Column]) -> Section:
    differing = differing_conditions(group.runs)
    ranked = {} if differing else {key: best_runs(group.runs, key) for key in METRICS}
    lines = [
        Line(
            label=run.label,
            cells=[[_number(run, key, i in ranked.get(key, ())) for key in column.metrics] for column in columns],
            size=f"{run.result.edits:,} × {run.result.retain_inputs:,}",
        )
        for i, run in enumerate(group.runs)
    ]
    note = f"Nothing is bold, because the runs differ in {' and '.join(differing)}." if differing else ""
    return Section(group.title, columns, lines, note)


def best_runs(runs: Sequence[Evaluation], key: str) -> set[int]:
    """Returns the indices of the best run by a metric, and of those that the intervals do not distinguish from it."""
    metric = METRICS[key]
    values = {i: value for i, run in enumerate(runs) if (value := run.result.metrics[key]) is not None}
    goodness = {i: metric.goodness(value) for i, value in values.items()}
    if len(goodness) < 2 or not metric.ranked:
        return set()
    best = max(goodness, key=lambda i: goodness[i])

    def covers(result: Result, value: float) -> bool:
        low, high = sorted(map(metric.goodness, result.intervals.get(key, (result.metrics[key],) * 2)))
        return low <= value <= high

    return {
        i
        for i in goodness
        if metric.show(goodness[i]) == metric.show(goodness[best])
        or covers(runs[i].result, goodness[best])
        or covers(runs[best].result, goodness[i])
    }


def _number(run: Evaluation, key: str, best: bool) -> Number:
    value, show = run.result.metrics[key], METRICS[key].show
    if value is None:
        return Number(NOTHING, "", False)
    low_and_high = run.result.intervals.get(key)
    return Number(show(value), f"[{', '.join(map(show, low_and_high))}]" if low_and_high else "", best)


def _kept(numbers: Sequence[Number]) -> list[Number]:
    """Returns the numbers to show in a cell; a missing one is shown only if it comes first."""
    return [number for i, number in enumerate(numbers) if i == 0 or number.value != NOTHING]


def markdown(table: Sequence[Section]) -> str:
    def show(number: Number) -> str:
        value = f"**{number.value}**" if number.best else number.value
        return f"{value} {number.interval}".strip()

    sections = []
    for section in table:
        titles = ["Method", *(column.title for column in section.columns), "Edits × inputs"]
        rows = [
            [_markdown_text(line.label), *(" / ".join(map(show, _kept(cell))) for cell in line.cells), line.size]
            for line in section.lines
        ]
        rule = ["---", *["---:"] * (len(titles) - 1)]
        grid = "".join(f"| {' | '.join(row)} |\n" for row in [titles, rule, *rows])
        note = f"\n{section.note}\n" if section.note else ""
        sections.append(f"### {_markdown_text(section.title)}\n\n{grid}{note}")
    return "\n".join([*sections, *(f"{note}\n" for note in NOTES)])


def _markdown_text(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\|*`<" else character for character in text)


def latex(table: Sequence[Section]) -> str:
    """Formats each run as a row of numbers with a row of intervals below it, so that the table fits a page."""

    def bold(number: Number) -> str:
        return f"\\textbf{{{latex_text(number.value)}}}" if number.best else latex_text(number.value)

    columns = table[0].columns if table else []
    width = len(columns) + 2
    units = [f"{column.first.unit} {column.first.arrow}".strip() for column in columns]
    body = [
        "% needs \\usepackage{array,booktabs}",
        f"\\begin{{tabular}}{{>{{\\raggedright\\arraybackslash}}p{{0.24\\linewidth}}{'r' * (width - 1)}}}",
        "\\toprule",
        _latex_row(map(latex_text, ["Method", *(column.first.label for column in columns), "Edits ×"])),
        _latex_row(map(latex_text, ["", *units, "inputs"])),
    ]
    for section in table:
        body += ["\\midrule", _spanning(width, f"\\textit{{{latex_text(section.title)}}}"), "\\addlinespace"]
        for line in section.lines:
            cells = (" / ".join(map(bold, _kept(cell))) for cell in line.cells)
            body.append(_latex_row([latex_text(line.label), *cells, latex_text(line.size)]))
            if any(number.interval for cell in line.cells for number in cell):
                below = (" / ".join(n.interval for n in cell if n.interval) for cell in line.cells)
                small = (f"{{\\scriptsize {latex_text(text)}}}" if text else "" for text in below)
                body.append(_latex_row(["", *small, ""]))
        body += [_spanning(width, f"\\footnotesize {latex_text(section.note)}")] if section.note else []
    return "\n".join([*body, "\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in NOTES), ""])


def _spanning(width: int, text: str) -> str:
    return f"\\multicolumn{{{width}}}{{p{{0.95\\linewidth}}}}{{{text}}} \\\\"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def latex_text(text: str) -> str:
    """Escapes special characters, and typesets powers such as 1e-4."""
    escaped = text.translate(str.maketrans(LATEX_SPECIAL))

    def power(match: re.Match[str]) -> str:
        digits, exponent = match.groups()
        factor = "" if digits == "1" else f"{digits} \\cdot "
        return f"${factor}10^{{{exponent}}}$"

    return POWER.sub(power, escaped)


def terminal_table(table: Sequence[Section]) -> TerminalTable:
    """Formats the table with line breaks within cells and titles, so that it fits 80 columns."""

    def show(number: Number) -> str:
        return f"[bold]{number.value}[/]" if number.best else number.value

    def cell(numbers: Sequence[Number]) -> str:
        intervals = [f"[dim]{escape(number.interval)}[/]" for number in numbers if number.interval]
        return "\n".join([" /\n".join(map(show, _kept(numbers))), *intervals]).replace(", ", ",\n")

    notes = [f"{section.title}: {section.note}" for section in table if section.note]
    caption = "\n".join(["Rates in %, 95 % intervals in brackets; equivalence: generated / human", *notes])
    shown = TerminalTable(box=SIMPLE_HEAD, padding=0, pad_edge=False, caption=caption)
    shown.add_column("Method")
    columns = table[0].columns if table else []
    titles = [f"{column.first.short} {column.first.arrow}".replace(" ", "\n") for column in columns]
    for title in (*titles, "Edits ×\ninputs"):
        shown.add_column(title, justify="right", overflow="fold")
    for section in table:
        shown.add_row(f"[italic]{escape(section.title)}[/]")
        for i, line in enumerate(section.lines):
            size = line.size.replace("× ", "×\n")
            shown.add_row(escape(line.label), *map(cell, line.cells), size, end_section=i == len(section.lines) - 1)
    return shown
