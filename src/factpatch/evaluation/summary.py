"""summary.json: what was measured, how, and the result. Evaluation writes it, reports read it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from factpatch.errors import FileError, InputError
from factpatch.files import atomic_file, read_text
from factpatch.metrics import METRICS, Outcome, intervals, summary

FILE = "summary.json"
VERSION = 1  # files of factpatch 0.1 have no version, which counts as 0
NAMES = ("model", "editor", "data", "valid", "others", "scope")  # conditions that are only names of files
ADVICE = "run factpatch evaluate with a new --output folder"


@dataclass(frozen=True)
class Conditions:
    """Describes what was measured and how. A run can resume another only if their `identity` is equal."""

    task: str  # classify or answer
    method: str  # the name under which the method is registered
    model: str | None = None  # as the user named it, like `editor`, `data` and `valid`
    model_kind: str | None = None  # such as "bert, 110M parameters"
    fingerprint: str | None = None
    layers: str = "all"
    bound: float | None = None
    loop: int = 1  # updates per edit, at most
    editor: str | None = None
    editor_hash: str | None = None
    data: str | None = None
    valid: str | None = None
    seed: int = 0
    targets: str = "beam"  # kind of answers that the edits ask for
    revisions: str | None = None  # sha256 of the edits and control inputs
    precision: str | None = None
    products: str | None = None  # precision of matrix products in float32
    together: list[int] = field(default_factory=list)  # numbers of facts edited together
    merge: str | None = None  # how their patches were merged
    options: dict[str, Any] = field(default_factory=dict)  # all other settings

    @classmethod
    def collect(cls, known: dict[str, Any]) -> Self:
        """Makes conditions from settings by name; those without a field become `options`."""
        names = {one.name for one in fields(cls)}
        options = {key: value for key, value in known.items() if key not in names}
        return cls(**{key: value for key, value in known.items() if key in names}, options=options)

    def identity(self) -> dict[str, Any]:
        """Returns all conditions but the names of files. The files' contents are included as hashes."""
        known = {**asdict(self), "options": {k: v for k, v in self.options.items() if k not in NAMES}}
        return {key: value for key, value in known.items() if key not in NAMES}


@dataclass(frozen=True)
class Result:
    """The metrics of a set of edits, with 95 % intervals."""

    metrics: dict[str, float | None]  # rates from 0 to 1
    intervals: dict[str, tuple[float, float]]
    edits: int
    retain_inputs: int
    seconds: float | None
    curve: tuple[JointResult, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], retain_inputs: int, seconds: float, group_size: int = 1) -> Self:
        return cls(summary(outcomes), intervals(outcomes, group_size), len(outcomes), retain_inputs, seconds)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object, with each metric as a key of its own."""
        sizes = {"edits": self.edits, "retain_inputs": self.retain_inputs, "seconds": self.seconds}
        curve = {"curve": [point.to_dict() for point in self.curve]} if self.curve else {}
        low_and_high = {key: list(pair) for key, pair in self.intervals.items()}
        return {**self.metrics, "intervals": low_and_high, **sizes, **curve}

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        if not isinstance(content, dict):
            raise InputError(f'expected an object in "result", found {shown(content)}')
        if not isinstance(curve := content.get("curve") or [], list):
            raise InputError(f'expected a list in "curve", found {shown(curve)}')
        return cls(
            metrics={key: _number(content, key) for key in METRICS},
            intervals=_intervals(content.get("intervals")),
            edits=int(_number(content, "edits") or 0),
            retain_inputs=int(_number(content, "retain_inputs") or 0),
            seconds=_number(content, "seconds"),
            curve=tuple(map(JointResult.from_dict, curve)),
        )


@dataclass(frozen=True)
class JointResult:
    """The metrics of facts that were edited together."""

    facts: int  # per group
    groups: int
    result: Result

    def to_dict(self) -> dict[str, Any]:
        return {"facts": self.facts, "groups": self.groups, **self.result.to_dict()}

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        result = Result.from_dict(content)
        return cls(int(_number(content, "facts") or 0), int(_number(content, "groups") or 0), result)


@dataclass(frozen=True)
class Summary:
    """The content of summary.json: one evaluated method."""

    conditions: Conditions
    result: Result
    tried: list[dict[str, Any]] = field(default_factory=list)  # the settings that --select compared
    environment: dict[str, Any] = field(default_factory=dict)  # device and versions
    version: int = VERSION

    def write(self, folder: Path, on_written: Callable[[], object] = lambda: None) -> None:
        """Writes the file. `on_written` is called after the content is written, before the file gets its name."""
        content = {
            "version": self.version,
            **asdict(self.conditions),
            "tried": self.tried,
            **self.environment,
            "result": self.result.to_dict(),
        }
        with atomic_file(folder / FILE) as scratch:
            scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            on_written()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the summary in a folder, also if an older version wrote it."""
        content = read_json(folder / FILE, ADVICE)
        try:
            return cls._from_dict(content)
        except InputError as error:
            raise InputError(f"{folder / FILE}: {error}") from None

    @classmethod
    def _from_dict(cls, content: Any) -> Self:
        version = content.get("version", 0) if isinstance(content, dict) else 0
        if isinstance(version, int) and version > VERSION:
            raise InputError(
                f"written by a newer factpatch (format {version}, this one reads up to {VERSION}); upgrade factpatch"
            )
        try:
            if not isinstance(content, dict):
                raise InputError(f"expected a JSON object, found {shown(content)}")
            for key, kind in get_type_hints(Conditions).items():
                if (key in content or key in ("task", "method")) and not _is_a(content.get(key), kind):
                    raise InputError(f'expected {_NAMES[kind]} in "{key}", found {shown(content.get(key))}')
            result = Result.from_dict(content.get("result"))
        except InputError as error:
            raise InputError(f"{error}; {ADVICE}") from None
        names = {one.name for one in fields(Conditions)}
        if not version:  # factpatch 0.1 left flipped predictions out of KL
            result.metrics.update(kl_mean=None, kl_worst=None)
        environment = {key: content[key] for key in ("versions", "device") if key in content}
        conditions = Conditions(**{key: value for key, value in content.items() if key in names})
        return cls(conditions, result, content.get("tried") or [], environment, version)


_NAMES: dict[Any, str] = {
    str: "a text",
    str | None: "a text or null",
    int: "a whole number",
    float | None: "a number or null",
    list[int]: "a list of whole numbers",
    dict[str, Any]: "an object",
}


def _is_a(value: Any, kind: Any) -> bool:
    """Returns True if a value has the type of a field of Conditions."""
    if kind == list[int]:
        return isinstance(value, list) and all(_is_a(one, int) for one in value)
    if kind == float | None:
        return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
    return isinstance(value, dict if kind == dict[str, Any] else kind) and not isinstance(value, bool)


def _number(record: dict[str, Any], key: str) -> float | None:
    """Returns a finite number, or None."""
    value = record.get(key)
    if value is not None and not isinstance(value, int | float):
        raise InputError(f'expected a number or null in "{key}", found {shown(value)}')
    return float(value) if value is not None and math.isfinite(value) else None


def _intervals(content: Any) -> dict[str, tuple[float, float]]:
    try:
        pairs = {key: content[key] for key in METRICS if content and content.get(key) is not None}
        return {key: (float(low), float(high)) for key, (low, high) in pairs.items()}
    except (AttributeError, TypeError, ValueError):
        raise InputError(f'expected [low, high] for each metric in "intervals", found {shown(content)}') from None


def read_json(path: Path, advice: str) -> Any:
    """Reads a JSON file. The error for a damaged file ends with the advice."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); {advice}") from None


def shown(value: Any) -> str:
    """Formats a value as JSON, shortened for an error message."""
    return json.dumps(value, ensure_ascii=False)[:60]
