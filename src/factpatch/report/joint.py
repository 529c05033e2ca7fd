"""Figure of facts edited together: metrics against the number of facts in one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from factpatch.metrics import METRICS
from factpatch.report.canvas import new_figure, stacked_parts, stroke, wrapped
from factpatch.report.runs import Evaluation, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SHOWN = ("success", "retain", "equivalence")
PANELS_HEIGHT, LEGEND_LINE = 2.7, 0.2  # inches


def draw_joint(groups: Sequence[Group]) -> Figure:
    """Draws success, retain and equivalence of each way of merging, with 95 % intervals."""
    heights = [PANELS_HEIGHT + LEGEND_LINE * len(group.runs) for group in groups]
    figure = new_figure(sum(heights) + 0.3)
    figure.suptitle("Facts edited together in one model (bars: 95 % intervals)")
    for part, group in zip(stacked_parts(figure, heights), groups, strict=True):
        _draw_group(part, group)
    return figure


def _draw_group(part: SubFigure, group: Group) -> None:
    part.suptitle(wrapped(group.title, 100), fontsize=9.5)
    panels = part.subplots(1, len(SHOWN), sharex=True)
    for axes, key in zip(panels, SHOWN, strict=True):
        for number, run in enumerate(group.runs):
            _draw_run(axes, run, key, number)
        sizes = sorted({point.facts for run in group.runs for point in run.result.curve})
        axes.set(xscale="log", title=METRICS[key].label, ylabel="%", xlabel="facts edited together (log scale)")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.grid(color="0.9")
    handles, labels = panels[0].get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower center", handlelength=3.5)


def _draw_run(axes: Axes, run: Evaluation, key: str, number: int) -> None:
    points = [(p.facts, p.result.metrics[key], p.result.intervals.get(key)) for p in run.result.curve]
    measured = [(facts, value, interval or (value, value)) for facts, value, interval in points if value is not None]
    below = [max(0.0, 100 * (value - low)) for _, value, (low, _) in measured]
    above = [max(0.0, 100 * (high - value)) for _, value, (_, high) in measured]
    sizes, rates = [facts for facts, _, _ in measured], [100 * value for _, value, _ in measured]
    label = wrapped(run.joint_label(), 90)
    axes.errorbar(sizes, rates, yerr=[below, above], label=label, capsize=3, **stroke(number))
