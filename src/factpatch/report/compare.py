"""Comparisons of methods: weighted scores, similarity of updates, and which weights they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from factpatch.report.runs import Evaluation, grouped

SAMPLES = 10_000


@dataclass(frozen=True)
class Contest:
    """Methods on one model (“systems”), scored under random weightings of success, retain and equivalence.

    Weights are drawn from Dirichlet(1, 1, 1). The share of weightings under which a system wins says how much the
    choice of weights matters. It is not a confidence level, because it ignores the number of edits.
    """

    task: str
    title: str
    labels: list[str]
    note: str  # in which conditions the runs differ; empty if in none
    totals: np.ndarray  # (systems, samples)  weighted scores
    wins: np.ndarray  # (systems, systems)  share of weightings under which the row scores higher than the column


def contests(runs: Sequence[Evaluation], seed: int) -> list[Contest]:
    """Makes a contest for each model with at least two systems that have all three metrics."""
    contests = []
    for group in grouped(runs):
        scores = {run.label: s for run in group.runs if (s := _three_scores(run)) is not None}
        if len(scores) > 1:
            differing = differing_conditions([run for run in group.runs if run.label in scores])
            note = f"runs differ in {' and '.join(differing)}" if differing else ""
            totals, wins = weigh(np.array(list(scores.values())), seed)
            contests.append(Contest(group.task, group.title, list(scores), note, totals, wins))
    return contests


def differing_conditions(runs: Sequence[Evaluation]) -> list[str]:
    """Returns the conditions in which runs differ; if there are any, their values should not be ranked."""
    conditions = {
        "precision": {run.conditions.precision for run in runs},
        "number of edits": {run.result.edits for run in runs},
        "number of inputs": {run.result.retain_inputs for run in runs},
        "kind of targets": {run.conditions.targets for run in runs},
    }
    differing = [name for name, values in conditions.items() if len(values) > 1]
    data = {run.conditions.revisions for run in runs}
    return differing or (["data"] if len(data) > 1 else [])


def weigh(scores: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes totals and wins of systems from their scores, (systems, 3). A tie is half a win."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(3), SAMPLES)  # (samples, 3)
    # The differences are weighted rather than the totals, so that equal systems tie despite rounding.
    lead = (scores[:, None] - scores) @ weights.T  # (systems, systems, samples)
    return scores @ weights.T, ((lead > 0) + 0.5 * (lead == 0)).mean(-1)


def _three_scores(run: Evaluation) -> list[float] | None:
    """Returns success, retain and equivalence, the last on generated paraphrases if any, otherwise on human ones."""
    metrics = run.result.metrics
    success, retain, equivalence = (metrics[key] for key in ("success", "retain", "equivalence"))
    equivalence = metrics["equivalence_human"] if equivalence is None else equivalence
    return None if success is None or retain is None or equivalence is None else [success, retain, equivalence]


def cosines(runs: Sequence[Evaluation]) -> np.ndarray:
    """Returns the mean cosine between two runs' updates of the same edits: (runs, runs), NaN if they share none."""
    return np.array([[_cosine(a, b) for b in runs] for a in runs])


def _cosine(a: Evaluation, b: Evaluation) -> float:
    if a.details is None or b.details is None or a.model != b.model:
        return np.nan
    ours, theirs = a.details.sketches, b.details.sketches
    pairs = [(ours[edit], theirs[edit]) for edit in ours if edit in theirs and ours[edit].any() and theirs[edit].any()]
    values = [x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs if x.shape == y.shape]
    return float(np.mean(values)) if values else np.nan


@dataclass(frozen=True)
class Position:
    """The position of a weight in a model: `model.decoder.layers.1.fc1` is decoder, 1, fc1."""

    stack: str
    block: int | None
    kind: str


def position(weight: str) -> Position:
    """Splits a weight's name: the first number is the block, the rest is the kind. Some weights have no block."""
    name = weight.removesuffix(".weight")
    match = re.fullmatch(r"(.*?)\.(\d+)\.(.+)", name)
    if match is None:
        return Position("", None, name)
    stack, block, kind = match.groups()
    sides = [side for side in ("encoder", "decoder") if side in stack.split(".")]
    return Position(sides[-1] if sides else stack, int(block), kind)


@dataclass(frozen=True)
class Grid:
    """Changes of weights by block and kind."""

    rows: list[str]
    columns: list[str]
    values: np.ndarray  # (rows, columns), NaN where a block has no such weight
    stacks: list[int]  # the rows at which another stack begins

    @property
    def shares(self) -> np.ndarray:
        """Returns the values relative to the largest one."""
        return self.values / np.nanmax(self.values)


def grid(magnitudes: Mapping[str, float]) -> Grid:
    """Arranges weights by block: the encoder above the decoder, each from its first block to its last."""
    positions = {weight: position(weight) for weight in magnitudes}
    stacks = sorted(dict.fromkeys(p.stack for p in positions.values()), key=lambda stack: stack == "decoder")
    kinds = list(dict.fromkeys(p.kind for p in positions.values()))
    blocks = {(p.stack, p.block) for p in positions.values()}
    rows = sorted(blocks, key=lambda row: (stacks.index(row[0]), -1 if row[1] is None else row[1]))
    values = np.full((len(rows), len(kinds)), np.nan)
    for weight, p in positions.items():
        values[rows.index((p.stack, p.block)), kinds.index(p.kind)] = magnitudes[weight]
    return Grid(
        rows=[_row_name(stack if len(stacks) > 1 else "", block) for stack, block in rows],
        columns=_shortest_endings(kinds),
        values=values,
        stacks=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
    )


def _row_name(stack: str, block: int | None) -> str:
    return f"{stack} {'' if block is None else block}".strip() or "other"


def _shortest_endings(kinds: Sequence[str]) -> list[str]:
    """Shortens names as far as they stay unique: attention.self.query becomes query."""
    endings = []
    for kind in kinds:
        parts = kind.split(".")
        candidates = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [f".{other}" for other in kinds if other != kind]
        endings.append(next((c for c in candidates if not any(o.endswith(f".{c}") for o in others)), kind))
    return endings
