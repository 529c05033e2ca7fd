"""Result folders: what `factpatch evaluate` and `factpatch train` left, read and checked."""

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

from factpatch.errors import FileError, InputError
from factpatch.jsonl import required_text, text_list

METRICS = ("success", "retain", "equivalence", "equivalence_human", "deterioration", "kl_mean", "kl_worst")
METHODS = {"hyper": "KnowledgeEditor", "finetune": "Fine-tune", "zhu": "Zhu et al.", "gradient": "Gradient"}
KINDS = {"input": "Edited input", "paraphrase": "Paraphrase", "unrelated": "Unrelated input"}
TASKS = {"classify": "Fact-checking", "answer": "Question answering"}  # in the order in which they are shown


@dataclass(frozen=True)
class Details:
    """What lies behind the rates. Arrays are empty where a method has nothing of the kind."""

    before: np.ndarray  # (pairs,) the unedited model's score of its own prediction for an input that was not edited
    after: np.ndarray  # (pairs,) the edited model's score of the same
    changed: np.ndarray  # (pairs,) whether the prediction flipped
    magnitudes: dict[str, float]  # by weight, root mean square of its change
    sketches: dict[str, np.ndarray]  # by edit, a random projection of its update


@dataclass(frozen=True)
class Row:
    """A text, and the model's best answers to it, best first."""

    kind: str  # of KINDS
    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    target: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Evaluation:
    """One method, measured."""

    name: str  # of the folder, with as much of its path as tells it from the others
    label: str  # what was run, in words; no two of a task are alike once all are read
    task: str
    model: str  # its fingerprint, or in old results its path
    result: dict[str, float | None]  # METRICS, rates from 0 to 1
    intervals: dict[str, tuple[float, float]]
    edits: int
    inputs: int
    seconds: float | None
    details: Details | None
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Training:
    """One editor's training, validation by validation."""

    name: str
    lines: tuple[dict[str, Any], ...]

    def series(self, key: str) -> np.ndarray:
        """A figure over time, (validations,); NaN where it is missing."""
        values = (_finite(line.get(key)) for line in self.lines)
        return np.array([math.nan if value is None else value for value in values])

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.series(key)).any())

    def constraints(self) -> list[str]:
        """Such as kl: what has a margin."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key for key in keys if f"{key}_margin" in keys]


def read_runs(paths: Sequence[Path]) -> tuple[list[Evaluation], list[Training]]:
    """The folders in their order; one that is given twice counts once."""
    folders = list(dict.fromkeys(Path(os.path.abspath(path)) for path in paths))
    evaluations: list[Evaluation] = []
    trainings: list[Training] = []
    for folder, name in zip(folders, _names(folders), strict=True):
        if (folder / "summary.json").is_file():
            evaluations.append(_read_evaluation(folder, name))
        elif _is_training(folder):
            trainings.append(Training(name, _read_lines(folder / "metrics.jsonl")))
        else:
            found = "other files" if folder.is_dir() else "a file" if folder.exists() else "nothing"
            raise InputError(
                f"{folder}: expected a folder written by factpatch evaluate (summary.json) or factpatch train "
                f"(config.json, metrics.jsonl), found {found}; name such a folder"
            )
    times = Counter((run.task, run.label) for run in evaluations)
    told_apart = [
        run if times[run.task, run.label] == 1 else replace(run, label=f"{run.label} ({run.name})")
        for run in evaluations
    ]
    return told_apart, trainings


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names; where two coincide, with the folders they lie in."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=0)):
        names = ["-".join(folder.parts[1:][-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name}-{i}" for i, folder in enumerate(folders, start=1)]


def _read_evaluation(folder: Path, name: str) -> Evaluation:
    path = folder / "summary.json"
    summary = _object(path)
    result = summary.get("result")
    if not isinstance(result, dict):
        raise InputError(f'{path}: expected an object in "result", found {_shown(result)}; evaluate again')
    return Evaluation(
        name=name,
        label=_label(summary, path),
        task=_choice(summary, "task", TASKS, path),
        model=str(summary.get("fingerprint") or Path(str(summary.get("model")))),
        result={metric: _number(result, metric, path) for metric in METRICS},
        intervals=_intervals(result.get("intervals"), path),
        edits=int(_number(result, "edits", path) or 0),
        inputs=int(_number(result, "retain_inputs", path) or 0),
        seconds=_number(result, "seconds", path),
        details=_read_details(folder / "details.safetensors"),
        examples=_read_examples(folder / "examples.json"),
    )


def _label(summary: dict[str, Any], path: Path) -> str:
    """Such as "Zhu et al., all, m = 1e-4"."""
    method = _choice(summary, "method", METHODS, path)
    if method == "hyper":
        return METHODS[method] + (" + loop" if (_finite(summary.get("loop")) or 1) > 1 else "")
    bound = _finite(summary.get("bound"))
    parts = [METHODS[method], str(summary.get("layers") or "all")]
    return ", ".join(parts if bound is None else [*parts, f"m = {short_number(bound)}"])


def short_number(value: float) -> str:
    """Two digits: 0.05 as it is, 0.0001 as 1e-4."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def _read_details(path: Path) -> Details | None:
    if not path.exists():
        return None
    try:
        found = defaultdict(lambda: np.zeros(0), load_file(path))
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
        weights, edits = (json.loads(metadata.get(name, "[]")) for name in ("weights", "edits"))
        scores = np.stack([found[name] for name in ("scores_before", "scores_after", "changed")])  # (3, pairs)
        before, after, changed = scores[:, np.isfinite(scores).all(0)]
        return Details(
            before=before,
            after=after,
            changed=changed.astype(bool),
            magnitudes=dict(zip(weights, found["magnitudes"].tolist(), strict=True)),
            sketches=dict(zip(map(str, edits), found["sketches"], strict=True)),
        )
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise FileError(f"{path}: expected the details of an evaluation, found {reason}; evaluate again") from error


def _read_examples(path: Path) -> tuple[Example, ...]:
    if not path.exists():
        return ()
    found = _parse(_text(path), path)
    try:
        return tuple(
            Example(required_text(example["edit"], "a"), tuple(map(_row, example["rows"]))) for example in found
        )
    except InputError as error:
        raise InputError(f"{path}: {error}; evaluate again") from None
    except (KeyError, TypeError, AttributeError):
        raise InputError(f'{path}: expected a list of {{"edit", "rows"}}, found another form; evaluate again') from None


def _row(record: dict[str, Any]) -> Row:
    kind = required_text(record, "kind")
    if kind not in KINDS:
        raise InputError(f'expected one of {", ".join(KINDS)} in "kind", found {_shown(kind)}')
    return Row(kind, required_text(record, "text"), text_list(record, "before"), text_list(record, "after"))


def _is_training(folder: Path) -> bool:
    """A fine-tuned model has files of the same names, but its config has no result."""
    config, metrics = folder / "config.json", folder / "metrics.jsonl"
    return config.is_file() and metrics.is_file() and {"config", "result"} <= _object(config).keys()


def _read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """A line a validation."""
    lines = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        record = _parse(line, path, number)
        if not isinstance(record, dict) or _finite(record.get("step")) is None:
            raise InputError(
                f'{path}, line {number}: expected an object with a number in "step", found {_shown(record)}; mend it'
            )
        lines.append(record)
    if not lines:
        raise InputError(f"{path}: expected a line for each validation, found none; wait for the run's first one")
    return tuple(lines)


def _object(path: Path) -> dict[str, Any]:
    found = _parse(_text(path), path)
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found {_shown(found)}; run its command again")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8, found other bytes at {error.start}; mend it") from None


def _parse(text: str, path: Path, line: int = 1) -> Any:
    """`line`: where in the file the text begins."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno - 1}"
        raise InputError(f"{place}: expected JSON, found a syntax error: {error.msg}; run its command again") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found what cannot be read: {error}; run its command again") from None


def _choice(record: dict[str, Any], key: str, choices: dict[str, str], path: Path) -> str:
    found = record.get(key)
    if not isinstance(found, str) or found not in choices:
        expected = ", ".join(choices)
        raise InputError(f'{path}: expected one of {expected} in "{key}", found {_shown(found)}; evaluate again')
    return found


def _number(record: dict[str, Any], key: str, path: Path) -> float | None:
    found = record.get(key)
    if found is not None and not isinstance(found, int | float):
        raise InputError(f'{path}: expected a number or null in "{key}", found {_shown(found)}; evaluate again')
    return _finite(found)


def _intervals(found: Any, path: Path) -> dict[str, tuple[float, float]]:
    """Low and high by metric, for those that have them."""
    try:
        there = {metric: found[metric] for metric in METRICS if found and found.get(metric) is not None}
        return {metric: (float(low), float(high)) for metric, (low, high) in there.items()}
    except (AttributeError, TypeError, ValueError):
        raise InputError(
            f'{path}: expected [low, high] for each metric in "intervals", found {_shown(found)}; evaluate again'
        ) from None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
