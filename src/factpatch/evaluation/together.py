"""Joint edits: N facts in one model at the same time.

For each N, the edits are cut into disjoint groups of N. The patches of a group are merged or, with a
scope, chosen by input, and each edit of the group is measured in the resulting model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from factpatch.data.revisions import Revision, edit_of, own_forms
from factpatch.editors import EditMethod
from factpatch.errors import InputError
from factpatch.evaluation.lines import TOGETHER, edit_line, outcome_of, write_groups
from factpatch.evaluation.measure import Examiner
from factpatch.evaluation.merges import Measure, MergeOptions, find_merge
from factpatch.evaluation.summary import JointResult, Result
from factpatch.models import TaskModel
from factpatch.resumable import ResumableLines

COVERED = 256  # edits measured one by one, and for each group size; more only if a single group is larger


@dataclass(frozen=True)
class Together:
    """How many facts to edit together, and how to combine their patches."""

    sizes: tuple[int, ...]
    merge: str = "sum"  # a key of MERGES
    others: Sequence[Revision] = ()  # inputs that the merge or the scope is fitted to
    options: MergeOptions = field(default_factory=MergeOptions)

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or len(set(self.sizes)) < len(self.sizes):
            raise InputError("expected different numbers of facts, each at least 1, such as 1,16,64")
        find_merge(self.merge)


def about_different_facts(edits: Sequence[Revision]) -> list[Revision]:
    """Drops revisions that share an input or a paraphrase with an earlier one: one model cannot hold both."""
    kept: list[Revision] = []
    used: set[str] = set()
    for revision in edits:
        forms = own_forms(revision)
        if used.isdisjoint(forms):
            kept.append(revision)
            used |= forms
    return kept


def count_groups(edits: int, size: int) -> int:
    """Returns how many groups of a size are measured."""
    if size > edits:
        raise InputError(f"--together {size} needs {size} edits, found {edits}; lower it, or raise --edits")
    return min(edits // size, max(1, COVERED // size))


def count_joint_edits(edits: int, sizes: Sequence[int]) -> int:
    """Returns how many edits are measured in groups, over all sizes."""
    return sum(size * count_groups(edits, size) for size in sizes)


def count_measured_edits(edits: int, sizes: Sequence[int]) -> int:
    """Returns how many edits are measured, one by one and in groups."""
    return (min(edits, COVERED) if sizes else edits) + count_joint_edits(edits, sizes)


def measure_together(
    method: EditMethod,
    model: TaskModel,
    edits: Sequence[Revision],
    others: Sequence[Revision],
    together: Together,
    folder: Path,
    settings: dict[str, Any],
    on_done: Callable[[int], object],
) -> tuple[ResumableLines | None, tuple[JointResult, ...]]:
    """Measures all groups and writes one line per edit; the caller finishes the file."""
    groups = [
        edits[k * size : (k + 1) * size] for size in together.sizes for k in range(count_groups(len(edits), size))
    ]

    @cache  # not needed if all groups are finished
    def measuring() -> tuple[Examiner, Measure]:
        merge = find_merge(together.merge)
        return Examiner(model, others, 1, scores=True), merge(model, together.others or others, together.options)

    def make_lines(number: int) -> list[str]:
        examiner, measure = measuring()
        group, start = groups[number], time.perf_counter()
        asked = [edit_of(revision) for revision in group]
        by_method = together.merge == "own"
        patches = [method.propose_together(model, asked)] if by_method else method.propose(model, asked)
        examined = measure(examiner, patches, group)
        about = {"facts": len(group), "group": number, "seconds": time.perf_counter() - start}
        return [edit_line(revision, one, **about) for revision, one in zip(group, examined, strict=True)]

    lines = write_groups(folder / TOGETHER, settings, groups, make_lines, on_done)
    return lines, _curve(lines.lines(), together.sizes, len(others)) if lines else ()


def _curve(lines: Iterable[str], sizes: Sequence[int], inputs: int) -> tuple[JointResult, ...]:
    records = list(map(json.loads, lines))
    points = []
    for size in sizes:
        members = [record for record in records if record["facts"] == size]
        seconds = sum({record["group"]: record["seconds"] for record in members}.values())
        result = Result.of(list(map(outcome_of, members)), inputs, seconds, group_size=size)
        points.append(JointResult(size, len(members) // size, result))
    return tuple(points)
