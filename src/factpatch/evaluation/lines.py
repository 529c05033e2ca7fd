"""Result lines, one per edit: several processes share the work, and an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from factpatch.data.revisions import Revision, edit_of
from factpatch.errors import FileError
from factpatch.evaluation.details import DETAILS
from factpatch.evaluation.measure import Examined
from factpatch.metrics import Outcome, value_names
from factpatch.processes import broadcast_from_first
from factpatch.resumable import ResumableLines, refuse_other_lines

EDITS, TOGETHER = "edits.jsonl", "together.jsonl"
KEY = "says"  # every line has it


def refuse_other_files(folder: Path) -> None:
    """Raises a FileError if a run would replace files in its folder that no evaluation has written."""
    for name in (EDITS, TOGETHER):
        refuse_other_lines(folder / name, KEY)
    begun = any((folder / name).exists() for name in (EDITS, f".{EDITS}.part"))
    for name in DETAILS:
        if not begun and (folder / name).exists():
            raise FileError(f"{folder / name} was not written by an evaluation; choose another --output")


def open_lines(path: Path, settings: dict[str, Any]) -> ResumableLines | None:
    """Opens a file of lines in the main process; returns None in the others."""
    return ResumableLines(path, settings, key=KEY) if PartialState().is_main_process else None


def write_groups(
    path: Path,
    settings: dict[str, Any],
    groups: Sequence[Sequence[Revision]],
    make_lines: Callable[[int], list[str]],
    on_done: Callable[[int], object],
) -> ResumableLines | None:
    """Makes one line per edit, for groups of edits that all processes share; `make_lines` gets a group's number.

    Groups that an interrupted run has finished are not made again. The main process writes the lines in order and
    returns their file, which the caller finishes; the others return None.
    """
    lines = open_lines(path, settings)
    ends = accumulate(map(len, groups))  # how many lines there are after each group
    done = broadcast_from_first(sum(end <= lines.done for end in ends) if lines else 0)
    edits_done = sum(map(len, groups[:done]))
    if lines:
        lines.keep(edits_done)
    on_done(edits_done)
    state = PartialState()
    for first in range(done, len(groups), state.num_processes):
        number = first + state.process_index
        made = make_lines(number) if number < len(groups) else []
        made = gather_object(made) if state.num_processes > 1 else made
        if lines:
            lines.write(made)
        on_done(len(made))
    return lines


def edit_line(revision: Revision, examined: Examined, **more: Any) -> str:
    """Returns the JSON line of one edit."""
    about = {
        "id": revision.id,
        "input": revision.input,
        "prediction": revision.prediction,
        "target": edit_of(revision).a,
        "says": examined.says[revision.input],
    }
    return json.dumps({**more, **about, **examined.outcome.values}, ensure_ascii=False)


def outcome_of(record: dict[str, Any]) -> Outcome:
    """Returns the outcome in a line that `edit_line` made, after parsing."""
    return Outcome({name: record.get(name) for name in value_names()})
