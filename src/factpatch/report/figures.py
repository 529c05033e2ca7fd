"""Figures of edit methods (De Cao et al., 2021): scores, changed weights, cosines, weighted metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from factpatch.report.beams import draw_beams
from factpatch.report.canvas import BLUE, DARK, ORANGE, new_figure, plain_powers, stacked_parts, wrapped
from factpatch.report.compare import Contest, Grid, cosines, grid
from factpatch.report.curves import draw_comparison, draw_curves
from factpatch.report.joint import draw_joint
from factpatch.report.runs import Details, Evaluation, Group, Training, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SCORES = {
    "classify": "log-odds of the original prediction",
    "answer": "mean log-probability of the original answer",
}
FEW = 1000  # up to this many points are drawn one by one
FAINTEST = 1e-4  # relative to the largest change; smaller ones share a colour
PANELS = 5  # heat maps side by side


def list_figures(
    runs: Sequence[Evaluation], trainings: Sequence[Training], contests: Sequence[Contest]
) -> dict[str, Callable[[], Figure]]:
    """Returns a drawing function for each figure that has data, by file name."""
    detailed = [(run, run.details) for run in runs if run.details is not None]
    changing = [run for run, details in detailed if any(size > 0 for size in details.magnitudes.values())]
    sketched = [run for run, details in detailed if details.sketches]
    drawings: dict[str, Callable[[], Figure]] = {
        f"logits-{run.name}": partial(draw_logits, run, details) for run, details in detailed if len(details.before)
    }
    if changing:
        drawings["magnitudes"] = partial(draw_magnitudes, grouped(changing))
    if several := [group for group in grouped(sketched) if len(group.runs) > 1]:
        drawings["cosines"] = partial(draw_cosines, several)
    if contests:
        drawings["dirichlet"] = partial(draw_contests, contests)
    if joint := grouped([run for run in runs if run.result.curve]):
        drawings["together"] = partial(draw_joint, joint)
    drawings |= {
        f"beams-{run.name}": partial(draw_beams, run, run.examples[0])
        for run in runs
        if any(e.rows for e in run.examples[:1])
    }
    drawings |= {f"curves-{training.name}": partial(draw_curves, training) for training in trainings}
    if len(trainings) > 1:
        drawings["curves-compare"] = partial(draw_comparison, trainings)
    return drawings


def draw_logits(run: Evaluation, details: Details) -> Figure:
    """Draws scores of control inputs; an ideal edit leaves all points on the diagonal (Figure 3 of De Cao et al.)."""
    figure = new_figure(5.3, 5.8)
    axes = figure.add_subplot()
    flipped = details.changed
    _draw_kept(figure, axes, details.before[~flipped], details.after[~flipped])
    _draw_flipped(axes, details.before[flipped], details.after[flipped])
    axes.axline((0, 0), slope=1, color="black", linewidth=1, linestyle="--", label="unchanged score")
    both = np.concatenate([details.before, details.after])
    pad = 0.04 * (np.ptp(both) or 1)
    limits = (both.min() - pad, both.max() + pad)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    score = SCORES.get(run.conditions.task, "score of the original prediction")
    axes.set(xlabel=f"{score}, before", ylabel=f"{score}, after")
    (group,) = grouped([run])
    edits, inputs = details.sample or (None, None)
    sample = f"{edits} edits × {inputs} inputs" if edits else f"{len(flipped):,} pairs of an edit and an input"
    kept = f"{100 * (1 - flipped.mean()):.2f} % of predictions kept in a sample of {sample}"
    whole = run.result.metrics["retain"]
    of_all = f"\n(retain over all {run.result.edits:,} edits: {100 * whole:.2f} %)" if whole is not None else ""
    axes.set_title(f"{wrapped(group.title, 70)}\n{wrapped(run.label, 70)}\n{kept}{of_all}")
    figure.legend(loc="outside lower center", ncols=3, handletextpad=0.4, columnspacing=1.2)
    return figure


def _draw_kept(figure: Figure, axes: Axes, before: np.ndarray, after: np.ndarray) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    label = f"kept: {len(before):,}"
    if len(before) <= FEW:
        axes.scatter(before, after, s=14, marker="o", color=DARK, alpha=0.5, linewidth=0, label=label)
        return
    shades = LinearSegmentedColormap.from_list("kept", ["#d3e0ee", BLUE])
    cells = axes.hexbin(before, after, gridsize=45, bins="log", mincnt=1, cmap=shades, linewidths=0.2)
    axes.scatter([], [], s=40, marker="h", color=BLUE, label=label)
    bar = figure.colorbar(cells, cax=axes.inset_axes((1.03, 0, 0.035, 1)), label="kept predictions in a cell")
    plain_powers(bar.ax.yaxis)


def _draw_flipped(axes: Axes, before: np.ndarray, after: np.ndarray) -> None:
    step = ceil(len(before) / FEW) or 1
    drawn = "" if step == 1 else f", one in {step} drawn"
    label = f"flipped: {len(before):,}{drawn}"
    look = {"marker": "X", "s": 26, "color": ORANGE, "edgecolor": "white", "linewidth": 0.5, "zorder": 3}
    axes.scatter(before[::step], after[::step], label=label, **look)


def draw_magnitudes(groups: Sequence[Group]) -> Figure:
    """Draws which weights each method changes, relative to its largest change (Figure 4 of De Cao et al.)."""
    grids = [_grids(group.runs) for group in groups]
    heights = [_maps_height(list(found.values())) for found in grids]
    figure = new_figure(sum(heights) + 0.2)
    figure.suptitle("Root mean square change of each weight, relative to the method's largest")
    for part, group, found in zip(stacked_parts(figure, heights), groups, grids, strict=True):
        _draw_maps(part, group.title, found)
    return figure


def _grids(runs: Sequence[Evaluation]) -> dict[str, Grid]:
    """Arranges each run's changes, by its label. Weights that only other runs change count as changed by 0."""
    changes = {run.label: run.details.magnitudes for run in runs if run.details}
    nothing = dict.fromkeys((weight for magnitudes in changes.values() for weight in magnitudes), 0.0)
    return {label: grid(nothing | magnitudes) for label, magnitudes in changes.items()}


def _arrange(grids: Sequence[Grid]) -> tuple[int, int, bool]:
    """Returns lines, columns, and whether each panel needs its own labels instead of sharing those of its line."""
    lines = ceil(len(grids) / PANELS)
    columns = ceil(len(grids) / lines)
    alike = len({(*found.rows, *found.columns) for found in grids}) == 1
    return lines, columns, not alike or lines * columns > len(grids)


def _maps_height(grids: Sequence[Grid]) -> float:
    lines, _, labelled = _arrange(grids)
    names = 1.4  # inches for the upright names of weights
    return 1.1 + lines * (0.7 + 0.19 * max(len(found.rows) for found in grids)) + names * (lines if labelled else 1)


def _draw_maps(part: SubFigure, title: str, grids: dict[str, Grid]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    part.suptitle(wrapped(title, 100), fontsize=9.5)
    _add_legend(part, list(grids.values()))
    lowest = min(found.shares[found.shares > 0].min() for found in grids.values())
    norm = LogNorm(min(max(lowest, FAINTEST), 0.5), 1)
    lines, columns, labelled = _arrange(list(grids.values()))
    panels = part.subplots(lines, columns, squeeze=False).ravel()
    for axes in panels[len(grids) :]:
        axes.remove()
    for i, (axes, (label, found)) in enumerate(zip(panels, grids.items(), strict=False)):
        _draw_map(axes, found, norm)
        axes.set_title(f"{wrapped(label, 110 // max(columns, 3))}\nlargest {np.nanmax(found.values):.1e}", fontsize=8.5)
        if labelled or i % columns == 0:
            axes.set_yticks(range(len(found.rows)), found.rows, fontsize=8)
            axes.set_ylabel("layer")
        if labelled or i + columns >= len(grids):
            axes.set_xticks(range(len(found.columns)), found.columns, rotation=90, fontsize=8)
            axes.set_xlabel("weight")
    extend = "min" if lowest < FAINTEST else "neither"
    scale = ScalarMappable(norm, "viridis")
    bar = part.colorbar(
        scale, ax=list(panels[: len(grids)]), label="relative change, log scale", extend=extend, aspect=30
    )
    plain_powers(bar.ax.yaxis)


def _add_legend(part: SubFigure, grids: Sequence[Grid]) -> None:
    """Explains cells without a colour."""
    from matplotlib.patches import Patch

    handles: list[Patch] = []
    if any((found.values == 0).any() for found in grids):
        handles.append(Patch(facecolor="white", edgecolor="0.6", hatch="////", label="unchanged by this method"))
    if any(np.isnan(found.values).any() for found in grids):
        handles.append(Patch(facecolor="white", edgecolor="0.6", label="no such weight in this layer"))
    if handles:
        part.legend(handles=handles, loc="outside lower center", ncols=2)


def _draw_map(axes: Axes, found: Grid, norm: Any) -> None:
    axes.imshow(np.ma.masked_where(~(found.shares > 0), found.shares), norm=norm, cmap="viridis", aspect="auto")
    _hatch(axes, found.values == 0)
    for row in found.stacks:
        axes.axhline(row - 0.5, color="white", linewidth=4)
    axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _hatch(axes: Axes, cells: np.ndarray) -> None:
    from matplotlib.patches import Rectangle

    for row, column in np.argwhere(cells):
        box = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="white", edgecolor="0.6", hatch="////", linewidth=0)
        axes.add_patch(box)


def draw_cosines(groups: Sequence[Group]) -> Figure:
    """Draws how similar the updates of any two methods are (Table 2 of De Cao et al.)."""
    heights = [1.0 + _rows_height([run.label for run in group.runs]) for group in groups]
    figure = new_figure(sum(heights) + 0.3, 3.6 + 0.75 * max(len(group.runs) for group in groups))
    figure.suptitle("Mean cosine between updates of the same edit")
    for part, group in zip(stacked_parts(figure, heights), groups, strict=True):
        axes = part.subplots()
        values = cosines(group.runs)
        _draw_matrix(axes, values, [run.label for run in group.runs], lowest=np.nanmin(values, initial=0), digits=3)
        axes.set(title=wrapped(group.title, 40), xlabel="method", ylabel="method")
    return figure


def draw_contests(contests: Sequence[Contest]) -> Figure:
    """Draws scores under random weightings of the metrics (Figures 5 and 6 of De Cao et al.)."""
    heights = [1.5 + _rows_height(contest.labels) for contest in contests]
    figure = new_figure(sum(heights) + 0.3)
    figure.suptitle("Random weightings of the three metrics success, retain and equivalence: Dirichlet(1, 1, 1)")
    for part, contest in zip(stacked_parts(figure, heights), contests, strict=True):
        part.suptitle(wrapped(contest.title + (f" ({contest.note})" if contest.note else ""), 100), fontsize=9.5)
        scores, wins = part.subplots(1, 2, width_ratios=[1.1, 1])
        _draw_densities(scores, 100 * contest.totals)
        _label_rows(scores, contest.labels)
        scores.set_title("Distribution of the weighted score")
        others = np.where(np.eye(len(contest.labels)), np.nan, contest.wins)
        _draw_matrix(wins, others, contest.labels, lowest=0, digits=2)
        wins.set_yticks(wins.get_xticks(), [label.get_text() for label in wins.get_xticklabels()])
        wins.set(title="Share of weightings under which the row\nscores higher than the column", xlabel="system")
        wins.set_ylabel("system")
    return figure


def _draw_densities(axes: Axes, totals: np.ndarray) -> None:
    """Draws one row per system, each scaled to its own peak, so that narrow distributions do not flatten others."""
    for row, scores in enumerate(totals):
        middle, reach = (scores.max() + scores.min()) / 2, max(np.ptp(scores), 0.2) / 2
        counts, edges = np.histogram(scores, bins=24, range=(middle - reach, middle + reach))
        base = row + 0.42
        tops = base - 0.8 * counts / counts.max()
        axes.stairs(tops, edges, baseline=base, fill=True, color="#8fb3d9")
        axes.stairs(tops, edges, baseline=base, color=DARK, linewidth=0.8)
        axes.plot([scores.mean()] * 2, [base, base - 0.8], color="black", linewidth=1.5)
    axes.set(xlabel="weighted score, % (thick line: its mean)", ylabel="system; density, scaled to its peak")
    axes.set_ylim(len(totals) - 0.5, -0.5)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _draw_matrix(axes: Axes, values: np.ndarray, labels: Sequence[str], lowest: float, digits: int) -> None:
    """Draws a heat map with numbers in the cells. Columns show row numbers, because long labels do not fit."""
    axes.imshow(values, vmin=lowest, vmax=1, cmap="cividis", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        light = np.isnan(value) or (value - lowest) / (1 - lowest) > 0.5
        text = "-" if np.isnan(value) else f"{value:.{digits}f}".replace("-", "−")
        axes.text(column, row, text, ha="center", va="center", color="black" if light else "white")
    axes.set_xticks(range(len(labels)), [f"[{i}]" for i, _ in enumerate(labels, start=1)])
    _label_rows(axes, labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [f"{wrapped(label)} [{i}]" for i, label in enumerate(labels, start=1)])


def _rows_height(labels: Sequence[str]) -> float:
    """Returns the height in inches that leaves room for all lines of the longest label."""
    return len(labels) * max(0.45, *(0.18 * (wrapped(label).count("\n") + 1) for label in labels))
