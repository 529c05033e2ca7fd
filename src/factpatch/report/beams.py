"""What a model answers before and after an edit, as tables of its best answers (the paper's Figure 2)."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

from factpatch.facts import same
from factpatch.report.canvas import DARK, new_figure, wrapped
from factpatch.report.runs import KINDS, Evaluation, Example, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.21  # inches
WIDTH = 8.0
POINTS = 70  # to an inch, less a little that the layout keeps free
EDGES = {"before": 0.03, "after": 0.53}  # where the columns begin, as shares of the width
COLUMN = 0.43  # how wide they are


def draw_beams(run: Evaluation, example: Example) -> Figure:
    """The first text of each kind."""
    rows = [row for kind in KINDS for row in [r for r in example.rows if r.kind == kind][:1]]
    heights = [LINE * (3 + len(_question(row)) + max(len(row.before), len(row.after))) for row in rows]
    figure = new_figure(sum(heights) + 0.9, WIDTH)
    title = f"{run.label}: best answers before and after an edit to “{_fit(example.target, 0.4)}”"
    figure.suptitle(wrapped(title, 80))
    figure.supxlabel("bold: the target; grey: as before, in the same place", fontsize=9)
    panels = figure.subplots(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, row, height in zip(panels, rows, heights, strict=True):
        _draw_panel(axes, row, example.target, round(height / LINE))
    return figure


def _draw_panel(axes: Axes, row: Row, target: str, lines: int) -> None:
    axes.set(xlim=(0, 1), ylim=(lines, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    question = _question(row)
    write = partial(axes.text, va="center", in_layout=False)  # they fit already, and must not shift the panel
    write(0, 0.5, KINDS[row.kind], color=DARK, fontweight="bold")
    for i, line in enumerate(question, start=1):
        write(0, i + 0.5, line, style="italic")
    top = len(question) + 1
    for name, answers, others in (("before", row.before, row.after), ("after", row.after, row.before)):
        left = EDGES[name]
        axes.plot([left, left + COLUMN], [top + 1, top + 1], color="0.4", linewidth=0.8)
        write(left, top + 0.5, name, color="0.3")
        for i, answer in enumerate(answers):
            bold = same(answer, target)
            grey = others[i : i + 1] == (answer,)
            write(left, top + 1.5 + i, f"{i + 1}", color="0.4")
            look = {"color": "0.4" if grey else "black", "fontweight": "bold" if bold else "normal"}
            write(left + 0.03, top + 1.5 + i, _fit(answer, COLUMN - 0.03, bold), **look)


def _question(row: Row) -> list[str]:
    """In two lines at most."""
    text = " ".join(row.text.split())[:500] or "-"
    letters = int(0.93 * WIDTH * POINTS / (_width(text, bold=False) / len(text)))
    return [_fit(line, 0.97) for line in textwrap.wrap(text, letters, max_lines=2, placeholder=" …")]


def _fit(text: str, share: float, bold: bool = False) -> str:
    """The text, cut so that it takes up no more than a share of the figure's width."""
    text = " ".join(text.split())[:200]
    limit = share * WIDTH * POINTS
    if _width(text, bold) <= limit:
        return text
    letters = bisect_right(range(len(text)), limit, key=lambda n: _width(f"{text[:n]}…", bold)) - 1
    return f"{text[:letters].rstrip()}…"


def _width(text: str, bold: bool) -> float:
    """In points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=9, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
