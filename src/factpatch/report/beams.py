"""Tables of a model's best answers before and after an edit (Figure 2 of De Cao et al., 2021)."""

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
POINTS = 70  # points per inch (72), less the layout's margins
LEFT, RIGHT = 0.02, 0.96  # shares of the width between which text is written
EDGES = {"before": 0.05, "after": 0.53}  # where the columns begin
COLUMN = 0.42  # their width


def draw_beams(run: Evaluation, example: Example) -> Figure:
    """Draws the answers to the first text of each kind."""
    rows = [row for kind in KINDS for row in [r for r in example.rows if r.kind == kind][:1]]
    heights = [LINE * (3 + len(_question(row)) + max(len(row.before), len(row.after))) for row in rows]
    figure = new_figure(sum(heights) + 1.1, WIDTH)
    title = f"{run.label}: best answers before and after an edit to “{_fit(example.target, 0.4)}”"
    outcome = "the edit succeeded" if example.success else "THE EDIT FAILED: the first answer is not the target"
    figure.suptitle(f"{wrapped(title, 80)}\n({outcome})")
    figure.supxlabel("bold: the target; grey: same answer at the same rank as before", fontsize=9)
    panels = figure.subplots(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, row, height in zip(panels, rows, heights, strict=True):
        _draw_panel(axes, row, example.target, round(height / LINE))
    return figure


def _draw_panel(axes: Axes, row: Row, target: str, lines: int) -> None:
    axes.set(xlim=(0, 1), ylim=(lines, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    question = _question(row)
    write = partial(axes.text, va="center", in_layout=False)  # texts are cut to fit, and must not shift the panel
    write(LEFT, 0.5, KINDS[row.kind], color=DARK, fontweight="bold")
    for i, line in enumerate(question, start=1):
        write(LEFT, i + 0.5, line, style="italic")
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
    """Wraps the text to at most two lines."""
    text = " ".join(row.text.split())[:500] or "-"
    letters = int((RIGHT - LEFT - 0.04) * WIDTH * POINTS / (_width(text, bold=False) / len(text)))
    return [_fit(line, RIGHT - LEFT) for line in textwrap.wrap(text, letters, max_lines=2, placeholder=" …")]


def _fit(text: str, share: float, bold: bool = False) -> str:
    """Cuts a text to a share of the figure's width."""
    text = " ".join(text.split())[:200]
    limit = share * WIDTH * POINTS
    if _width(text, bold) <= limit:
        return text
    letters = bisect_right(range(len(text)), limit, key=lambda n: _width(f"{text[:n]}…", bold)) - 1
    return f"{text[:letters].rstrip()}…"


def _width(text: str, bold: bool) -> float:
    """Returns the width of a text in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=9, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
