"""The common look of all figures, and writing them to files."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factpatch.errors import InputError
from factpatch.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

WIDTH = 9.0  # inches
DARK, BLUE, ORANGE = "#1b3a5c", "#2a5f98", "#d55e00"

# Dashes and markers differ too, so that lines can be distinguished in greyscale.
STROKES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": ORANGE, "linestyle": "--", "marker": "s"},
    {"color": "#0072b2", "linestyle": "-.", "marker": "^"},
    {"color": "#009e73", "linestyle": ":", "marker": "D"},
    {"color": "#cc79a7", "linestyle": (0, (6, 2, 1, 2, 1, 2)), "marker": "v"},
    {"color": "#8c6d1f", "linestyle": (0, (2, 1)), "marker": "x"},
]


def stroke(number: int) -> dict[str, Any]:
    """Returns the look of a line, by its number in the figure."""
    return {"markersize": 4.5, "linewidth": 1.3, **STROKES[number % len(STROKES)]}


STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "figure.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # facts may contain dollar signs
    "svg.fonttype": "none",  # keep text searchable
    "svg.hashsalt": "factpatch",  # the same runs give the same bytes
}


def find_matplotlib() -> None:
    """Raises an InputError if matplotlib is not installed."""
    try:
        import_module("matplotlib")
    except ImportError:
        raise InputError(
            "figures need matplotlib, which is not installed; run pip install 'factpatch[plots]'"
        ) from None


# Control characters, which XML does not allow; matplotlib copies them from the labels.
CONTROL = bytes(set(range(32)) - {9, 10, 13})


def new_figure(height: float, width: float = WIDTH) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def stacked_parts(figure: Figure, heights: Sequence[float]) -> list[SubFigure]:
    """Divides a figure into parts, one below the other."""
    return list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)


def write_figures(drawings: Mapping[str, Callable[[], Figure]], folder: Path) -> list[Path]:
    """Draws each figure and writes it as PNG and SVG."""
    find_matplotlib()
    import matplotlib

    files: list[Path] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # matplotlib draws a box
        for name, draw in drawings.items():
            figure = draw()
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                files.append(folder / f"{name}.{kind}")
                with atomic_file(files[-1]) as scratch:
                    figure.savefig(scratch, format=kind, dpi=150, metadata=metadata)
                    if kind == "svg":
                        scratch.write_bytes(scratch.read_bytes().translate(None, CONTROL))
    return files


def wrapped(label: str, width: int = 24) -> str:
    """Wraps a label at spaces, but keeps `m = 1e-4` together."""
    return textwrap.fill(label.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"), width, break_long_words=False)


def plain_powers(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers such as 0.01, since STYLE turns off mathematical text."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1, 0.4)))  # for axes that show less than a decade
