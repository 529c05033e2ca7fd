"""The paper's main table (Table 1): one row a run, for Markdown, LaTeX, spreadsheets and the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as TerminalTable

from factpatch.files import atomic_file
from factpatch.report.compare import Contest
from factpatch.report.runs import METRICS, TASKS, Evaluation, short_number

NOTHING = "-"
LATEX_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "[": "{[}",  # after the \\ of the row before it would be read as that row's option
    "×": "$\\times$",
    "−": "$-$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
}


@dataclass(frozen=True)
class Number:
    """One number as shown."""

    value: str
    interval: str  # empty where there is none
    best: bool  # of its column, among the runs of its task


@dataclass(frozen=True)
class Line:
    label: str
    cells: list[list[Number]]  # a column's numbers: two where generated and human paraphrases were measured
    size: str


@dataclass(frozen=True)
class Table:
    titles: list[str]
    groups: dict[str, list[Line]]  # by task


@dataclass(frozen=True)
class Column:
    title: str
    short: str  # for the terminal
    metrics: tuple[str, ...]
    lower_is_better: bool
    show: Callable[[float], str]


def _percent(decimals: int) -> Callable[[float], str]:
    return lambda share: f"{100 * share:z.{decimals}f}".replace("-", "−")


# Retain and deterioration are means over edits times inputs, so they bear another decimal.
COLUMNS = (
    Column("Success, % ↑", "Success ↑", ("success",), False, _percent(1)),
    Column("Retain, % ↑", "Retain ↑", ("retain",), False, _percent(2)),
    Column("Equivalence, % ↑", "Equiv. ↑", ("equivalence", "equivalence_human"), False, _percent(1)),
    Column("Deterioration, % ↓", "Deter. ↓", ("deterioration",), True, _percent(2)),
    Column("Mean KL ↓", "KL ↓", ("kl_mean",), True, short_number),
)


def main_table(runs: Sequence[Evaluation]) -> Table:
    groups = {task: [run for run in runs if run.task == task] for task in TASKS}
    return Table(
        titles=["Method", *(column.title for column in COLUMNS), "Edits × inputs"],
        groups={TASKS[task]: _lines(group) for task, group in groups.items() if group},
    )


def _lines(runs: Sequence[Evaluation]) -> list[Line]:
    best = {metric: _best(runs, metric, column) for column in COLUMNS for metric in column.metrics}
    return [
        Line(
            label=run.label,
            cells=[[_number(run, metric, column, best[metric]) for metric in column.metrics] for column in COLUMNS],
            size=f"{run.edits:,} × {run.inputs:,}",
        )
        for run in runs
    ]


def _best(runs: Sequence[Evaluation], metric: str, column: Column) -> str | None:
    """As shown, so that all runs that look best are; none where there is nothing to compare."""
    values = [value for run in runs if (value := run.result[metric]) is not None]
    if len(values) < 2:
        return None
    return column.show(min(values) if column.lower_is_better else max(values))


def _number(run: Evaluation, metric: str, column: Column, best: str | None) -> Number:
    value = run.result[metric]
    if value is None:
        return Number(NOTHING, "", False)
    shown = column.show(value)
    interval = f"[{', '.join(map(column.show, run.intervals[metric]))}]" if metric in run.intervals else ""
    return Number(shown, interval, shown == best)


def _cell(numbers: Sequence[Number], show: Callable[[Number], str]) -> str:
    """Generated / human; the second is left out where there is none."""
    kept = [number for i, number in enumerate(numbers) if i == 0 or number.value != NOTHING]
    return " / ".join(map(show, kept))


def write_tables(table: Table, runs: Sequence[Evaluation], contests: Sequence[Contest], folder: Path) -> list[Path]:
    """table.md, table.tex, table.csv and dirichlet.csv, those for which there is something."""
    texts: dict[str, str] = {}
    if runs:
        texts |= {"table.md": markdown(table), "table.tex": latex(table), "table.csv": raw_numbers(runs)}
    if contests:
        texts["dirichlet.csv"] = win_probabilities(contests)
    for name, text in texts.items():
        with atomic_file(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def markdown(table: Table) -> str:
    def show(number: Number) -> str:
        value = f"**{number.value}**" if number.best else number.value
        return f"{value} {number.interval}".strip()

    sections = []
    for task, lines in table.groups.items():
        rows = [[_markdown_text(line.label), *(_cell(c, show) for c in line.cells), line.size] for line in lines]
        rule = ["---", *["---:"] * (len(table.titles) - 1)]
        grid = "".join(f"| {' | '.join(row)} |\n" for row in [table.titles, rule, *rows])
        sections.append(f"### {task}\n\n{grid}")
    return "\n".join([*sections, _note()])


def _note() -> str:
    return (
        "Equivalence: of generated paraphrases / of those that people wrote. "
        "In brackets: 95 % intervals. Bold: the best of a column.\n"
    )


def _markdown_text(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\|*`<" else character for character in text)


def latex(table: Table) -> str:
    def show(number: Number) -> str:
        value = latex_text(number.value)
        interval = f" {{\\scriptsize {latex_text(number.interval)}}}" if number.interval else ""
        return (f"\\textbf{{{value}}}" if number.best else value) + interval

    width = len(table.titles)
    body = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        "\\toprule",
        _latex_row(map(latex_text, table.titles)),
    ]
    for task, lines in table.groups.items():
        body += ["\\midrule", f"\\multicolumn{{{width}}}{{l}}{{\\textit{{{latex_text(task)}}}}} \\\\"]
        body += [
            _latex_row([latex_text(line.label), *(_cell(c, show) for c in line.cells), latex_text(line.size)])
            for line in lines
        ]
    return "\n".join([*body, "\\bottomrule", "\\end{tabular}", ""])


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def latex_text(text: str) -> str:
    return text.translate(str.maketrans(LATEX_SPECIAL))


def raw_numbers(runs: Sequence[Evaluation]) -> str:
    """CSV: rates from 0 to 1 with their intervals, empty where there is none."""
    titles = ["task", "method", "run"]
    for metric in METRICS:
        titles += [metric, f"{metric}_low", f"{metric}_high"]
    rows: list[list[object]] = [[*titles, "edits", "retain_inputs", "seconds"]]
    for run in sorted(runs, key=lambda run: list(TASKS).index(run.task)):
        numbers = [n for m in METRICS for n in (run.result[m], *run.intervals.get(m, (None, None)))]
        rows.append([run.task, run.label, run.name, *numbers, run.edits, run.inputs, run.seconds])
    return _csv(rows)


def win_probabilities(contests: Sequence[Contest]) -> str:
    """CSV: for every two systems of a task, how probable it is that the first scores higher."""
    rows: list[list[object]] = [["task", "system", "other", "probability"]]
    for contest in contests:
        for i, system in enumerate(contest.labels):
            others = [j for j in range(len(contest.labels)) if j != i]
            rows += [[contest.task, system, contest.labels[j], float(contest.wins[i, j])] for j in others]
    return _csv(rows)


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def terminal_table(table: Table) -> TerminalTable:
    """Intervals below their numbers, so that it fits 80 columns."""

    def show(number: Number) -> str:
        return f"[bold]{number.value}[/]" if number.best else number.value

    caption = "Rates in %, 95 % intervals in brackets; equivalence: generated / human"
    shown = TerminalTable(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption=caption)
    shown.add_column("Method", no_wrap=True)
    for title in (*(column.short for column in COLUMNS), "Edits × inputs"):
        shown.add_column(title, justify="right", overflow="fold")
    for task, lines in table.groups.items():
        shown.add_row(f"[italic]{task}[/]")
        for i, line in enumerate(lines):
            cells = ["\n".join([_cell(c, show), *_intervals(c)]) for c in line.cells]
            shown.add_row(escape(fill(line.label, 23)), *cells, line.size, end_section=i == len(lines) - 1)
    return shown


def _intervals(numbers: Sequence[Number]) -> list[str]:
    return [f"[dim]{escape(number.interval)}[/]" for number in numbers if number.interval]
