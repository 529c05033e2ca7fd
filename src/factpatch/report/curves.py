"""Training curves: metrics on the held-out set, losses and constraints at each validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from factpatch.metrics import METRICS
from factpatch.report.canvas import new_figure, plain_powers, stroke, wrapped
from factpatch.report.runs import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATES = ("success", "retain", "equivalence", "equivalence_human")


def draw_curves(training: Training) -> Figure:
    """Draws rates, the loss and constraints with their margins, and multipliers."""
    constraints = training.constraints()
    heights = [2.3, 2.3, 1.3] if constraints else [2.3, 2.0]
    figure = new_figure(sum(heights) + 0.7, 7.5)
    figure.suptitle("Training of an editor: metrics at each validation")
    rates, losses, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_lines(rates, training, _measured([training]), scale=100)
    rates.set(ylabel="share, %")
    rates.set_ylim(top=101)
    shown = {"loss": "edit loss"}
    for name in constraints:
        shown |= {name: name.upper(), f"{name}_margin": f"{name.upper()}'s margin"}
    _draw_lines(losses, training, shown)
    losses.set(yscale="log", ylabel=" and ".join(["loss", *map(str.upper, constraints)]) + ", log scale")
    plain_powers(losses.yaxis)
    for axes in below:
        _draw_lines(axes, training, {f"{name}_multiplier": f"{name.upper()}'s multiplier" for name in constraints})
        axes.set(ylabel="multiplier")
        axes.set_ylim(bottom=0)
    (below or [losses])[-1].set_xlabel("step")
    figure.align_ylabels()
    return figure


def draw_comparison(trainings: Sequence[Training]) -> Figure:
    """Draws the rates of several runs, with one panel per rate."""
    measured = _measured(trainings)
    figure = new_figure(2.1 * len(measured) + 0.8, 7.5)
    figure.suptitle("Training runs compared: metrics at each validation")
    panels = figure.subplots(len(measured), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, label) in zip(panels, measured.items(), strict=True):
        for i, training in enumerate(trainings):
            _draw_line(axes, training, key, wrapped(training.name, 30), 100, i)
        axes.set(ylabel=f"{label}, %")
        axes.set_ylim(top=101)
        axes.grid(color="0.9")
    panels[-1].set_xlabel("step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(labels)), handlelength=3.5)
    return figure


def _measured(trainings: Sequence[Training]) -> dict[str, str]:
    """Returns the rates to show, with labels. Not all data has paraphrases written by people."""
    shown = [key for key in RATES if key != "equivalence_human" or any(t.has(key) for t in trainings)]
    return {key: METRICS[key].label.lower() for key in shown}


def _draw_lines(axes: Axes, training: Training, shown: dict[str, str], scale: float = 1) -> None:
    for i, (key, label) in enumerate(shown.items()):
        _draw_line(axes, training, key, label, scale, i)
    axes.grid(color="0.9")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown), handlelength=3.5, borderaxespad=0.2)


def _draw_line(axes: Axes, training: Training, key: str, label: str, scale: float, number: int) -> None:
    steps, values = training.series("step"), scale * training.series(key)
    measured = np.isfinite(values)
    every = max(1, measured.sum() // 10)
    axes.plot(steps[measured], values[measured], label=label, markevery=(number % every, every), **stroke(number))
