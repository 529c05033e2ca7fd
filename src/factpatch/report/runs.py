"""Reads and checks the result folders of `factpatch evaluate` and `factpatch train`."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from factpatch.editors import METHODS
from factpatch.errors import FileError, InputError
from factpatch.evaluation.summary import ADVICE, FILE, Conditions, Result, Summary, read_json, shown
from factpatch.facts import same
from factpatch.files import refuse_device
from factpatch.jsonl import read_jsonl, required_text, text_list
from factpatch.metrics import short_number

KINDS = {"input": "Edited input", "paraphrase": "Paraphrase", "unrelated": "Unrelated input"}
TASKS = {"classify": "Fact-checking", "answer": "Question answering"}  # in the order of the report


@dataclass(frozen=True)
class Details:
    """Scores and updates of the first edits, for figures. Arrays are empty where nothing was recorded."""

    before: np.ndarray  # (pairs,)  the unedited model's score of its own prediction for a control input
    after: np.ndarray  # (pairs,)  the edited model's score of the same prediction
    changed: np.ndarray  # (pairs,)  whether the prediction flipped
    sample: tuple[int, int] | None  # numbers of edits and control inputs that the pairs come from
    magnitudes: dict[str, float]  # by weight, root mean square of its change
    sketches: dict[str, np.ndarray]  # by edit, a random projection of its update


@dataclass(frozen=True)
class Row:
    """A text with the model's best answers, best first."""

    kind: str  # a key of KINDS
    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """One edit with the model's answers to a few texts."""

    target: str
    rows: tuple[Row, ...]

    @property
    def success(self) -> bool:
        return any(row.kind == "input" and same(row.after[0], self.target) for row in self.rows if row.after)


@dataclass(frozen=True)
class Evaluation:
    """One evaluated method."""

    name: str  # the folder's name, with as many parents as make it unique
    label: str  # the method and its settings; unique among the runs of one model
    conditions: Conditions
    result: Result
    details: Details | None
    examples: tuple[Example, ...]

    @property
    def model(self) -> str:
        """Identifies the model; results of version 0.1 have only its path."""
        return self.conditions.fingerprint or str(self.conditions.model)

    def joint_label(self) -> str:
        """Returns the label with the way in which patches were merged."""
        merged = f", merged by {self.conditions.merge}" if self.conditions.merge else ""
        return self.label.removesuffix(merged) + merged


@dataclass(frozen=True)
class Group:
    """The runs of one task with one model, which can be compared."""

    task: str
    title: str
    runs: list[Evaluation]


@dataclass(frozen=True)
class Training:
    """The training of one editor, validation by validation."""

    name: str
    lines: tuple[dict[str, Any], ...]

    def series(self, key: str) -> np.ndarray:
        """Returns the values of one metric, (validations,); NaN where it is missing."""
        values = (_finite(line.get(key)) for line in self.lines)
        return np.array([math.nan if value is None else value for value in values])

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.series(key)).any())

    def constraints(self) -> list[str]:
        """Returns the names of metrics with a margin, such as kl."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key for key in keys if f"{key}_margin" in keys]


def read_runs(paths: Sequence[Path]) -> tuple[list[Evaluation], list[Training]]:
    """Reads folders in the given order; a folder that is given twice counts once."""
    folders = list(dict.fromkeys(Path(os.path.abspath(path)) for path in paths))
    evaluations: list[Evaluation] = []
    trainings: list[Training] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        if (folder / FILE).is_file():
            evaluations.append(_read_evaluation(folder, name))
        elif _is_training(folder):
            trainings.append(Training(name, _read_lines(folder / "metrics.jsonl")))
        else:
            found = "other files" if folder.is_dir() else "a file" if folder.exists() else "nothing"
            raise InputError(
                f"{folder}: expected the output folder of factpatch evaluate or factpatch train, found {found}; "
                "check the path"
            )
    return _with_unique_labels(evaluations), trainings


def _with_unique_labels(runs: Sequence[Evaluation]) -> list[Evaluation]:
    """Adds the way of merging, or else the folder's name, to labels that are equal."""
    times = Counter((run.model, run.label) for run in runs)
    for extend in (Evaluation.joint_label, lambda run: f"{run.label} ({run.name})"):
        longer = [replace(run, label=extend(run)) if times[run.model, run.label] > 1 else run for run in runs]
        if len({(run.model, run.label) for run in longer}) == len(longer):
            return longer
    return list(runs)


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with those of their parents if two names are equal."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=0)):
        names = ["-".join(folder.parts[1:][-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name}-{i}" for i, folder in enumerate(folders, start=1)]


def grouped(runs: Sequence[Evaluation]) -> list[Group]:
    """Groups runs by task and model."""
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for run in runs:
        groups.setdefault((run.conditions.task, run.model), []).append(run)
    order = [*TASKS, *sorted({task for task, _ in groups} - TASKS.keys())]
    return [
        Group(task, f"{TASKS.get(task, task)}: {model_name(members[0].conditions)}", members)
        for (task, _), members in sorted(groups.items(), key=lambda group: order.index(group[0][0]))
    ]


def model_name(conditions: Conditions) -> str:
    """Names a model for titles, such as "bert, 110M parameters (runs/fc)"."""
    path = Path(conditions.model or "a model without a name")
    name = path.name if path.is_absolute() else str(path)
    return f"{conditions.model_kind} ({name})" if conditions.model_kind else name


def _read_evaluation(folder: Path, name: str) -> Evaluation:
    summary = Summary.read(folder)
    return Evaluation(
        name=name,
        label=_label(summary.conditions),
        conditions=summary.conditions,
        result=summary.result,
        details=_read_details(folder / "details.safetensors"),
        examples=_read_examples(folder / "examples.json"),
    )


def _label(conditions: Conditions) -> str:
    """Names a run, such as "Zhu et al., all, m = 1e-4". A method that is not registered is shown by its own name."""
    method = METHODS.get(conditions.method)
    label = method.label if method else conditions.method
    parts = [f"{label} + loop" if conditions.loop > 1 else label]
    if not conditions.editor_hash and not (method and method.trainable):
        parts.append(conditions.layers)
    if conditions.bound is not None:
        parts.append(f"m = {short_number(conditions.bound)}")
    if conditions.targets != "beam":
        parts.append(f"{conditions.targets} targets")
    return ", ".join(parts)


def _read_details(path: Path) -> Details | None:
    if not path.exists():
        return None
    refuse_device(path)
    try:
        arrays = defaultdict(lambda: np.zeros(0), load_file(path))
        for name, array in arrays.items():
            if array.ndim != (2 if name == "sketches" and array.size else 1):
                raise ValueError(f"{name} has {array.ndim} dimensions")
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
        weights, edits, sample = (json.loads(metadata.get(name, "[]")) for name in ("weights", "edits", "scored"))
        scores = np.stack([arrays[name] for name in ("scores_before", "scores_after", "changed")])  # (3, pairs)
        before, after, changed = scores[:, np.isfinite(scores).all(0)]
        return Details(
            before=before,
            after=after,
            changed=changed.astype(bool),
            sample=(int(sample[0]), int(sample[1])) if sample else None,
            magnitudes=dict(zip(weights, arrays["magnitudes"].tolist(), strict=True)),
            sketches=dict(zip(map(str, edits), arrays["sketches"], strict=True)),
        )
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise FileError(f"{path} cannot be read ({reason}); remove it to report without its figures") from error


def _read_examples(path: Path) -> tuple[Example, ...]:
    if not path.exists():
        return ()
    examples = read_json(path, "correct it, or remove the file")
    try:
        return tuple(
            Example(required_text(example["edit"], "a"), tuple(map(_row, example["rows"]))) for example in examples
        )
    except InputError as error:
        raise InputError(f"{path}: {error}; {ADVICE}") from None
    except (KeyError, TypeError, AttributeError):
        raise InputError(f'{path}: expected a list of {{"edit", "rows"}}, found another form; {ADVICE}') from None


def _row(record: dict[str, Any]) -> Row:
    kind = required_text(record, "kind")
    if kind not in KINDS:
        raise InputError(f'expected one of {", ".join(KINDS)} in "kind", found {shown(kind)}')
    return Row(kind, required_text(record, "text"), text_list(record, "before"), text_list(record, "after"))


def _is_training(folder: Path) -> bool:
    """Returns whether a folder is an editor's training run. `fit` writes files of the same names, but other keys."""
    config = folder / "config.json"
    if not config.is_file() or not (folder / "metrics.jsonl").is_file():
        return False
    content = read_json(config, "correct it, or remove the file")
    return isinstance(content, dict) and {"config", "result"} <= content.keys()


def _read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Reads metrics.jsonl, which has one line per validation."""

    def parse(record: dict[str, Any]) -> dict[str, Any]:
        if _finite(record.get("step")) is None:
            raise InputError(f'expected an object with a number in "step", found {shown(record)}')
        return record

    def refuse(message: str) -> None:
        raise InputError(f"{message}; remove the line")

    lines = tuple(read_jsonl(path, parse, on_bad=refuse))
    if not lines:
        raise InputError(f"{path} has no validations yet; wait for the first one")
    return lines


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
