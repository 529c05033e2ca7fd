"""Methods against each other: whose weighted score is higher, whose updates are alike, which weights they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from factpatch.report.runs import METRICS, TASKS, Evaluation

SAMPLES = 10_000


@dataclass(frozen=True)
class Contest:
    """Systems of one task under weights drawn from Dirichlet(1, 1, 1) over success, retain and equivalence."""

    task: str
    labels: list[str]
    totals: np.ndarray  # (systems, samples) weighted scores
    wins: np.ndarray  # (systems, systems) probability that the row's system beats the column's


def contests(runs: Sequence[Evaluation], seed: int) -> list[Contest]:
    """One for each task with two systems or more that have all three metrics."""
    found = []
    for task in TASKS:
        scores = {run.label: s for run in runs if run.task == task and (s := _three_scores(run)) is not None}
        if len(scores) > 1:
            found.append(Contest(task, list(scores), *weigh(np.array(list(scores.values())), seed)))
    return found


def weigh(scores: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Totals and wins of systems by their scores, (systems, 3). A tie is half a win."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(3), SAMPLES)  # (samples, 3)
    # Of the difference rather than of the totals, so that equal systems tie whatever the rounding.
    lead = (scores[:, None] - scores) @ weights.T  # (systems, systems, samples)
    return scores @ weights.T, ((lead > 0) + 0.5 * (lead == 0)).mean(-1)


def _three_scores(run: Evaluation) -> list[float] | None:
    """Generated paraphrases count, or those that people wrote where there are no others."""
    success, retain, generated, human = (run.result[metric] for metric in METRICS[:4])
    equivalence = human if generated is None else generated
    return None if success is None or retain is None or equivalence is None else [success, retain, equivalence]


def cosines(runs: Sequence[Evaluation]) -> np.ndarray:
    """Mean cosine of the updates of each two runs over the edits they share, (runs, runs); NaN where there are none."""
    return np.array([[_cosine(a, b) for b in runs] for a in runs])


def _cosine(a: Evaluation, b: Evaluation) -> float:
    if a.details is None or b.details is None or a.model != b.model:
        return np.nan
    ours, theirs = a.details.sketches, b.details.sketches
    pairs = [(ours[edit], theirs[edit]) for edit in ours if edit in theirs and ours[edit].any() and theirs[edit].any()]
    found = [x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs if x.shape == y.shape]
    return float(np.mean(found)) if found else np.nan


@dataclass(frozen=True)
class Place:
    """Where a weight stands in a model: `model.decoder.layers.1.fc1` is decoder, 1, fc1."""

    stack: str
    block: int | None
    kind: str


def place(weight: str) -> Place:
    """The first number in a name is the block, what follows it the kind. A weight outside the blocks has no number."""
    name = weight.removesuffix(".weight")
    match = re.fullmatch(r"(.*?)\.(\d+)\.(.+)", name)
    if match is None:
        return Place("", None, name)
    stack, block, kind = match.groups()
    sides = [side for side in ("encoder", "decoder") if side in stack.split(".")]
    return Place(sides[-1] if sides else stack, int(block), kind)


@dataclass(frozen=True)
class Grid:
    """Changes of weights by block and kind."""

    rows: list[str]
    columns: list[str]
    values: np.ndarray  # (rows, columns), NaN where a block has no such weight
    stacks: list[int]  # the rows at which another stack begins

    @property
    def shares(self) -> np.ndarray:
        """Of the largest."""
        return self.values / np.nanmax(self.values)


def grid(magnitudes: Mapping[str, float]) -> Grid:
    """Encoder over decoder, each from its first block to its last."""
    places = {weight: place(weight) for weight in magnitudes}
    stacks = sorted(dict.fromkeys(p.stack for p in places.values()), key=lambda stack: stack == "decoder")
    kinds = list(dict.fromkeys(p.kind for p in places.values()))
    blocks = {(p.stack, p.block) for p in places.values()}
    rows = sorted(blocks, key=lambda row: (stacks.index(row[0]), -1 if row[1] is None else row[1]))
    values = np.full((len(rows), len(kinds)), np.nan)
    for weight, p in places.items():
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
    """attention.self.query is query, unless another kind ends in that too."""
    endings = []
    for kind in kinds:
        parts = kind.split(".")
        candidates = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [f".{other}" for other in kinds if other != kind]
        endings.append(next((c for c in candidates if not any(o.endswith(f".{c}") for o in others)), kind))
    return endings
