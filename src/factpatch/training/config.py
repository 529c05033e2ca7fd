"""How to train an editor: one dataclass, from a preset, a TOML file and single settings."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from factpatch.editors import EditorConfig
from factpatch.errors import InputError

PRESETS = ("fc", "qa", "paper-fc", "paper-qa")
CONSTRAINTS = {"kl": ("kl",), "lp": ("lp",), "both": ("kl", "lp"), "none": ()}


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on but its model and its data."""

    # The objective
    constraint: str = "kl"  # kl, lp, both or none
    kl_over: str = "top1"  # what KL looks at in answers: each token of the model's own top1, or its beam of candidates
    p: float = 2.0  # of lp
    margin: float = 1e-1  # of kl, to begin with
    margin_floor: float = 1e-3  # and at last
    lp_margin: float = 1e-6
    lp_margin_floor: float = 1e-9
    margin_factor: float = 0.8  # the margins' step down, at every validation with success above:
    anneal_above: float = 0.9
    paraphrases: str = "generated"  # which the editor learns from: generated, human, all or none
    paraphrase_rows: int = 1  # sampled for each edit
    label_smoothing: float = 0.0  # of the edit loss
    updates: int = 1  # of each edit, each computed on the model as the last one left it

    # One step
    edits: int = 128
    rows: int = 16  # of each edit: its input, its paraphrases, and others, whose answers shall stay
    others: str = "uniform"  # how they are drawn: uniform, or unsure, more often where the model is less sure
    max_tokens: int = 32  # longer inputs are cut
    split: int = 1  # parts that a step is run in, where memory is short

    # The optimizer
    steps: int = 6000
    minutes: float | None = None  # the schedule is stretched over this time instead
    optimizer: str = "rmsprop"  # centred, as the paper's code has it; or adam, decoupled decay, as its text says
    lr: float = 3e-4
    multiplier_lr: float = 1e-1
    weight_decay: float = 0.0
    warmup: int = 100  # steps, a tenth of all at most
    schedule: str = "linear"  # or constant, after the warm-up
    clip: float | None = None  # the most that the gradient's norm may be
    precision: str | None = None  # fp32 or bf16; bf16 on a GPU, if left out
    graphs: bool = True  # on a GPU, a step's kernels are recorded once and then launched together

    # The editor
    layers: tuple[str, ...] = ("*",)  # patterns of names of weights that may be edited
    editor: EditorConfig = field(default_factory=EditorConfig)

    # Choosing the best
    holdout: int = 500  # revisions held out of train, a tenth at most, where no --valid is given
    validations: int = 60  # over the whole run
    validation_edits: int = 128  # sampled for each validation
    validation_inputs: int = 32  # other inputs that each of them is tried on
    validation_paraphrases: int = 2  # of each kind, likewise
    checkpoint_seconds: float = 60.0
    tracker: str | None = None  # such as tensorboard
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise InputError("; ".join(problems))

    @property
    def constraints(self) -> tuple[str, ...]:
        return CONSTRAINTS[self.constraint]

    @property
    def candidates(self) -> int:
        """Rows of one other input: its prediction alone, or all of its beam."""
        return 5 if self.kl_over == "beam" else 1

    @property
    def paraphrases_a_step(self) -> int:
        return 0 if self.paraphrases == "none" else self.paraphrase_rows

    @property
    def others_a_step(self) -> int:
        """Other inputs of each edit."""
        return max(0, self.rows - 1 - self.paraphrases_a_step) // self.candidates if "kl" in self.constraints else 0


def _problems(config: TrainConfig) -> list[str]:
    """All that is wrong with a config whose values have the right types."""
    choices = {
        "constraint": tuple(CONSTRAINTS),
        "kl_over": ("top1", "beam"),
        "paraphrases": ("generated", "human", "all", "none"),
        "others": ("uniform", "unsure"),
        "optimizer": ("rmsprop", "adam"),
        "schedule": ("linear", "constant"),
        "precision": (None, "fp32", "bf16"),
    }
    positive = (
        *("p", "margin", "margin_floor", "lp_margin", "lp_margin_floor", "margin_factor", "updates", "edits", "split"),
        *("rows", "max_tokens", "steps", "lr", "multiplier_lr", "holdout", "validations", "validation_edits"),
        *("validation_inputs", "minutes", "clip"),
    )
    not_negative = ("validation_paraphrases", "weight_decay", "warmup", "paraphrase_rows", "checkpoint_seconds", "seed")
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    problems = [
        f"{key}={values[key]} must be one of {', '.join(str(c) for c in allowed if c)}"
        for key, allowed in choices.items()
        if values[key] not in allowed
    ]
    problems += [
        f"{key}={values[key]} must be above 0"
        for key in positive
        if values[key] is not None and not 0 < values[key] < float("inf")
    ]
    problems += [f"{key}={values[key]} must not be below 0" for key in not_negative if not values[key] >= 0]
    problems += [
        f"{key}={values[key]} must be at least 0 and below 1"
        for key in ("label_smoothing", "anneal_above")
        if not 0 <= values[key] < 1
    ]
    problems += [
        f"{margin}={values[margin]} must not be below {margin}_floor={values[floor]}"
        for margin, floor in (("margin", "margin_floor"), ("lp_margin", "lp_margin_floor"))
        if values[margin] < values[floor]
    ]
    if config.holdout < 2:
        problems.append(f"holdout={config.holdout} must be at least 2")
    if config.seed >= 2**63:
        problems.append(f"seed={config.seed} must be below 2**63")
    if not config.margin_factor < 1:
        problems.append(f"margin_factor={config.margin_factor} must be below 1")
    needed = 1 + config.paraphrases_a_step + (config.candidates if config.constraint in ("kl", "both") else 0)
    if config.rows < needed:
        problems.append(f"rows={config.rows} must be at least {needed}: an input, its paraphrases, an other input")
    if config.split > config.edits:
        problems.append(f"split={config.split} must not be above edits={config.edits}")
    if not config.layers:
        problems.append("layers must name at least one pattern")
    return problems


def resolve_config(
    preset: str | None, path: str | Path | None, settings: Sequence[str], overrides: Mapping[str, Any]
) -> TrainConfig:
    """A preset's values, then a TOML file's, then `key=value` settings, then what the command line's own options say.

    How long to train is one thing: steps that come later take the place of minutes that came before. All problems are
    told in one error.
    """
    problems: list[str] = []
    layers = [_preset(preset)] if preset else []
    if path is not None:
        layers.append(_read_toml(Path(path)))
    layers.append(_from_settings(settings, problems))
    layers.append({key: value for key, value in overrides.items() if value is not None})
    merged: dict[str, Any] = {}
    for values in layers:
        if "steps" in values:
            merged.pop("minutes", None)
        for key, value in values.items():
            nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = {**merged[key], **value} if nested else value
    return _config(merged, problems)


def config_from_json(saved: Mapping[str, Any]) -> TrainConfig:
    if saved.get("others") == "alike":  # as it was called once
        saved = {**saved, "others": "uniform"}
    return _config(saved, [])


def _config(values: Mapping[str, Any], problems: list[str]) -> TrainConfig:
    """A config of these values, or an error that adds what is wrong with them to the problems known already."""
    typed = _typed(TrainConfig, values, "", problems)
    try:
        config = TrainConfig(**typed)
    except InputError as error:
        raise InputError("; ".join([*problems, str(error)])) from None
    if problems:
        raise InputError("; ".join(problems))
    return config


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    return {**asdict(config), "layers": list(config.layers)}


def _preset(name: str) -> dict[str, Any]:
    return tomllib.loads((files("factpatch.training") / "presets" / f"{name}.toml").read_text())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(PRESETS)
        raise InputError(f"no config at {path} ({error.strerror}); give a TOML file or one of {names}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from None


def _from_settings(settings: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """`editor.width=512` becomes {"editor": {"width": 512}}; what is no TOML value is taken as text."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            problems.append(f"expected key=value, found {setting!r}")
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        *outer, last = key.strip().split(".")
        place = found
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                break
        if isinstance(place, dict):
            place[last] = value
        else:
            problems.append(f"{key} is set both as a value and as a table")
    return found


def _typed(cls: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The values as the dataclass wants them; unknown keys and wrong types are told, and left out."""
    kinds = typing.get_type_hints(cls)
    typed: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if key not in kinds:
            problems.append(f"unknown setting {name}; known are {', '.join(kinds)}")
            continue
        kind = kinds[key]
        if is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, dict):
                problems.append(f"{name} must be a table, found {value!r}")
                continue
            inner = _typed(kind, value, f"{name}.", problems)
            try:
                typed[key] = kind(**inner)
            except InputError as error:
                problems.append(str(error))
            continue
        try:
            typed[key] = _as_kind(kind, value)
        except ValueError as error:
            problems.append(f"{name}={value!r} must be {error}")
    return typed


def _as_kind(kind: Any, value: Any) -> Any:
    """The value as a number, text, truth or texts; a ValueError that says what was expected."""
    if isinstance(kind, types.UnionType):
        return None if value is None else _as_kind(next(k for k in kind.__args__ if k is not type(None)), value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind == tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    raise ValueError(names.get(kind, "a list of texts"))
