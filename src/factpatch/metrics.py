"""Metrics of edits. The table `METRICS` defines how each one is measured, summarised, bootstrapped and shown.

A new metric needs only an entry in that table: results, summary.json, reports and the command line all read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from factpatch.facts import same

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

SAMPLES = 1000  # of the bootstrap


def is_correct(prediction: str, answers: Sequence[str]) -> bool:
    """Returns True if a prediction equals one of the gold answers after normalising."""
    return any(same(prediction, answer) for answer in answers)


def accuracy(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Returns the share of predictions that match a gold answer: accuracy of labels, exact match of free answers."""
    return sum(map(is_correct, predictions, answers)) / len(predictions)


# What one edit did


@dataclass(frozen=True)
class Observation:
    """Everything that metrics may use about one edit."""

    target: str
    answer: str  # what the edited model answers to x
    paraphrase_answers: list[str]  # answers to generated paraphrases
    human_paraphrase_answers: list[str]  # answers to paraphrases written by people
    unchanged: Booleans  # (control inputs,)  whether the prediction is as before
    correct_before: Booleans  # (control inputs with gold answers,)
    correct_after: Booleans  # (control inputs with gold answers,)
    kl: Floats  # (control inputs,)  between the predictions before and after; empty if not measured
    neighbours_unchanged: Sequence[bool] = ()  # whether each neighbour's prediction is as before
    forced: float | None = None  # share of the target's tokens that are most likely under teacher forcing, for x
    forced_paraphrases: Sequence[float] = ()  # the same for each paraphrase of either kind

    def share_of_target(self, answers: Sequence[str]) -> float | None:
        return _mean([same(answer, self.target) for answer in answers])


@dataclass(frozen=True)
class Outcome:
    """The values of one edit, by the names listed in `METRICS`; None where there was nothing to measure."""

    values: dict[str, float | None]

    @property
    def success(self) -> bool:
        return bool(self.values["success"])


def measure_all(seen: Observation) -> Outcome:
    """Computes every per-edit value of every metric."""
    return Outcome({name: measure(seen) for metric in METRICS.values() for name, measure in metric.values.items()})


def _mean(values: Sequence[float] | Booleans | Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


# Summaries over edits: functions of arrays (..., edits) that hold NaN where an edit has no value


def mean_over_edits(values: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.nansum(values, -1) / (~np.isnan(values)).sum(-1)


def relative_loss(before: Floats, after: Floats) -> Floats:
    """Returns 1 − mean after / mean before."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - mean_over_edits(after) / mean_over_edits(before)


def max_over_edits(values: Floats) -> Floats:
    return np.fmax.reduce(values, -1, initial=np.nan)


# Formats


def percent(decimals: int) -> Callable[[float], str]:
    return lambda share: f"{100 * share:z.{decimals}f}".replace("-", "−")


def short_number(value: float) -> str:
    """Formats two significant digits: 0.05 stays as it is, 0.0001 becomes 1e-4."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


# The table


@dataclass(frozen=True)
class Metric:
    """How one metric is measured, summarised and shown."""

    label: str
    short: str  # a label for narrow tables
    meaning: str  # a phrase that explains it where it is printed
    values: Mapping[str, Callable[[Observation], float | None]]  # what is measured per edit, by name
    summarise: Callable[..., Floats] = mean_over_edits  # takes one array per entry of `values`
    interval: Literal["bootstrap", "share"] | None = None  # share: bootstrap, but Wilson's interval at 0 and 1
    show: Callable[[float], str] = short_number
    unit: str = ""
    higher_is_better: bool = True
    saturates: float | None = None  # values better than this are equally good
    ranked: bool = True  # whether tables mark the best value
    on_controls: bool = False  # measured on control inputs, so that facts edited together share one value
    column_of: str | None = None  # the metric whose column of a table it shares
    in_tables: bool = True
    optional: bool = False  # tables show it only if some run has a value

    @property
    def arrow(self) -> str:
        return "↑" if self.higher_is_better else "↓"

    def goodness(self, value: float) -> float:
        """Returns the value on a scale where higher is better."""
        sign = 1 if self.higher_is_better else -1
        return sign * value if self.saturates is None else min(sign * value, sign * self.saturates)


def _share(decimals: int = 1) -> dict[str, Any]:
    return {"interval": "share", "show": percent(decimals), "unit": "%"}


METRICS: dict[str, Metric] = {
    "success": Metric(
        "Success",
        "Success",
        "edits after which the model gives the target",
        {"success": lambda seen: same(seen.answer, seen.target)},
        **_share(),
    ),
    # Retain and deterioration are means over edits times inputs, so a second decimal is meaningful.
    "retain": Metric(
        "Retain",
        "Retain",
        "control inputs whose answer is unchanged",
        {"retain": lambda seen: _mean(seen.unchanged)},
        on_controls=True,
        **_share(2),
    ),
    "equivalence": Metric(
        "Equivalence",
        "Equiv.",
        "generated paraphrases of the edited input that get the target",
        {"equivalence": lambda seen: seen.share_of_target(seen.paraphrase_answers)},
        **_share(),
    ),
    "equivalence_human": Metric(
        "Equivalence, human",
        "Human",
        "paraphrases written by people that get the target",
        {"equivalence_human": lambda seen: seen.share_of_target(seen.human_paraphrase_answers)},
        column_of="equivalence",
        **_share(),
    ),
    "deterioration": Metric(
        "Deterioration",
        "Deter.",
        "accuracy that is lost on control inputs",
        {
            "accuracy_before": lambda seen: _mean(seen.correct_before),
            "accuracy_after": lambda seen: _mean(seen.correct_after),
        },
        summarise=relative_loss,
        interval="bootstrap",
        show=percent(2),
        unit="%",
        higher_is_better=False,
        saturates=0.0,  # an edit that happens to raise the accuracy is not better than one that keeps it
        on_controls=True,
    ),
    "retain_neighbours": Metric(
        "Retain, neighbours",
        "Neighb.",
        "easily confused inputs whose answer is unchanged",
        {"retain_neighbours": lambda seen: _mean(seen.neighbours_unchanged)},
        optional=True,
        **_share(),
    ),
    # Teacher-forced figures are there to compare with published tables; what users see is success and equivalence.
    "forced_success": Metric(
        "Forced success",
        "Forced",
        "tokens of the target that are most likely after the edited input and the target's earlier tokens",
        {"forced_success": lambda seen: seen.forced},
        ranked=False,
        optional=True,
        **_share(),
    ),
    "forced_equivalence": Metric(
        "Forced equivalence",
        "Forced eq.",
        "tokens of the target that are most likely after a paraphrase and the target's earlier tokens",
        {"forced_equivalence": lambda seen: _mean(seen.forced_paraphrases)},
        ranked=False,
        optional=True,
        **_share(),
    ),
    # Not ranked: how far predictions move matters less than whether they flip, which retain measures.
    "kl_mean": Metric(
        "Mean KL",
        "KL",
        "KL divergence from the unedited model on control inputs",
        {"kl_mean": lambda seen: _mean(seen.kl)},
        higher_is_better=False,
        ranked=False,
        on_controls=True,
    ),
    "kl_worst": Metric(
        "Worst KL",
        "Worst KL",
        "largest KL divergence on any control input",
        {"kl_worst": lambda seen: float(seen.kl.max()) if len(seen.kl) else None},
        summarise=max_over_edits,
        higher_is_better=False,
        ranked=False,
        on_controls=True,
        in_tables=False,
    ),
}


def value_names() -> list[str]:
    """Returns the names of all values that are measured per edit."""
    return [name for metric in METRICS.values() for name in metric.values]


# Results over many edits


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Returns each metric over all edits; None where no edit has a value."""
    values = {key: float(metric.summarise(*_columns(metric, outcomes))) for key, metric in METRICS.items()}
    return {key: value if np.isfinite(value) else None for key, value in values.items()}


def intervals(outcomes: Sequence[Outcome], group_size: int = 1) -> dict[str, tuple[float, float]]:
    """Returns 95 % bootstrap intervals of the summary.

    Every `group_size` successive outcomes belong to edits that were applied together: groups, and then edits within
    each group, are drawn with replacement. A metric that a group's edits share has no interval for a single group.
    """
    rng = np.random.default_rng(0)
    groups = len(outcomes) // group_size
    group = rng.integers(0, groups, (SAMPLES, groups, 1))
    member = rng.integers(0, group_size, (SAMPLES, groups, group_size))
    drawn = (group * group_size + member).reshape(SAMPLES, -1)  # (samples, edits)
    bounds: dict[str, tuple[float, float]] = {}
    for key, metric in METRICS.items():
        if metric.interval is None or (metric.on_controls and groups == 1 and group_size > 1):
            continue
        columns = _columns(metric, outcomes)
        whole = float(metric.summarise(*columns))
        units = groups if metric.on_controls else np.isfinite(columns[0]).sum()
        if metric.interval == "share" and whole in (0, 1):
            bounds[key] = wilson(whole, int(units))
            continue
        sampled = metric.summarise(*(column[drawn] for column in columns))  # (samples,)
        if len(sampled := sampled[np.isfinite(sampled)]):
            low, high = np.quantile(sampled, [0.025, 0.975]).tolist()
            bounds[key] = (low, high)
    return bounds


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of `count` trials. Unlike a bootstrap's, it has a width at 0 and 1."""
    middle, spread = share + z**2 / (2 * count), z * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    low, high = ((middle + side * spread) / (1 + z**2 / count) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def _columns(metric: Metric, outcomes: Sequence[Outcome]) -> list[Floats]:
    """Returns (edits,) for each value of the metric; missing values are NaN."""
    return [np.array([one.values.get(name) for one in outcomes], np.float64) for name in metric.values]
