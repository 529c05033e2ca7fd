"""TrainConfig: all settings of training an editor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from factpatch.data.targets import KINDS
from factpatch.editors.least_squares import SHRINKAGE
from factpatch.editors.registry import METHODS, find_method
from factpatch.errors import InputError
from factpatch.training.settings import merged, preset_values, read_settings, read_toml, typed

PRESETS = ("fc", "qa", "lm", "cpu-fc", "cpu-qa", "cpu-lm", "paper-fc", "paper-qa", "mend")
CONSTRAINTS = {"kl": ("kl",), "lp": ("lp",), "both": ("kl", "lp"), "none": ()}
CHOICES: dict[str, tuple[str | None, ...]] = {
    "constraint": tuple(CONSTRAINTS),
    "kl_over": ("top1", "beam"),
    "paraphrases": ("generated", "human", "all", "none"),
    "targets": tuple(KINDS),
    "others": ("uniform", "unsure", "near"),
    "optimizer": ("rmsprop", "adam"),
    "schedule": ("linear", "constant"),
    "multiplier_schedule": ("linear", "constant"),
    "precision": (None, "fp32", "bf16"),
}
MIXTURES = ("targets", "others")  # settings that may name several choices
POSITIVE = (
    *("p", "margin", "margin_floor", "lp_margin", "lp_margin_floor", "margin_factor", "updates", "edits", "split"),
    *("together", "multiplier", "ridge", "wordings", "length_groups"),
    *("rows", "max_tokens", "steps", "lr", "multiplier_lr", "holdout", "validations", "validation_edits"),
    *("validation_inputs", "validation_share", "final_edits", "final_inputs", "control_pool", "minutes", "clip"),
)
NOT_NEGATIVE = (
    *("validation_paraphrases", "weight_decay", "warmup", "paraphrase_rows", "checkpoint_seconds", "seed"),
    "shrinkage",
)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run, apart from its model and its data."""

    # The editor
    method: str = "hyper"  # any registered method that can be trained
    layers: tuple[str, ...] = ("*",)  # weights to edit: blocks, name patterns, mlp, or mlp:3 for the last three
    editor: Any = None  # the method's own config; its defaults if None

    # The objective
    constraint: str = "kl"  # kl, lp, both or none
    kl_over: str = "top1"  # KL of each token of the model's prediction (top1) or over the candidates of its beam
    p: float = 2.0  # the norm of the lp constraint
    margin: float = 1e-1  # initial margin of the kl constraint
    margin_floor: float = 1e-3  # smallest margin of the kl constraint
    lp_margin: float = 1e-6
    lp_margin_floor: float = 1e-9
    margin_factor: float = 0.8  # multiplies the margins after each validation whose success is above anneal_above
    anneal_above: float = 0.9
    multiplier: float | None = None  # constant weight of the constraints; None means multipliers that follow the margin
    paraphrases: str = "generated"  # paraphrases to learn from: generated, human, all or none
    paraphrase_rows: int = 1  # paraphrases drawn per edit
    wordings: int = 1  # wordings per fact that are edited and serve as control inputs: its own, and some paraphrases
    label_smoothing: float = 0.0  # of the edit loss
    targets: tuple[str, ...] = ("beam",)  # kinds of answers to edit to, drawn with equal chance: see data/targets.py
    ridge: float | None = None  # λ of the least-squares form of updates; None: plain updates; ignored by merges
    shrinkage: float = SHRINKAGE  # of the covariance in that form; larger values generalise better to paraphrases
    updates: int = 1  # updates per edit, each computed on the model as the previous one left it
    together: int = 1  # edits that each step merges into one patch; a value above 1 also sets `edits`

    # One step
    edits: int = 128  # edits per step
    rows: int = 16  # rows per edit: its input, its paraphrases and control inputs
    others: tuple[str, ...] = ("uniform",)  # how control inputs are drawn, in equal shares: see controls.py
    control_pool: int | None = None  # maximum number of different control inputs in a run
    max_tokens: int = 32  # longer inputs are truncated
    split: int = 1  # parts in which each step is run, to save memory
    length_groups: int = 3  # maximum number of groups of rows of similar length, which saves padding

    # The optimizer
    steps: int = 6000
    minutes: float | None = None  # stretches the schedule over this time instead
    optimizer: str = "rmsprop"  # centred RMSprop, as in the paper's code, or adam with decoupled decay, as in its text
    lr: float = 3e-4
    multiplier_lr: float = 1e-1
    multiplier_schedule: str = "constant"  # schedule of multiplier_lr: constant, or linear with the same warm-up as lr
    weight_decay: float = 0.0
    warmup: int = 100  # steps, at most a tenth of the run
    schedule: str = "linear"  # schedule of lr after the warm-up: linear to 0, or constant
    clip: float | None = None  # maximum gradient norm
    ema: float | None = None  # decay of a moving average of the weights, such as 0.999, which is then used and saved
    precision: str | None = None  # fp32 or bf16; None means bf16 on a GPU and fp32 on a CPU
    graphs: bool = True  # record each step as a CUDA graph, on a GPU

    # Choosing the best editor
    holdout: int = 500  # revisions held out of train without --valid, at most a tenth
    validations: int = 60  # in the whole run
    # validate once per epoch, that is, whenever as many rows have run as there are revisions
    validate_epochs: bool = False
    validation_edits: int = 128  # drawn for each validation
    validation_inputs: int = 32  # control inputs per validation
    validation_paraphrases: int = 2  # per edit, of each kind
    validation_share: float | None = None  # maximum share of the time for validations, in runs limited by minutes
    final_edits: int = 200  # held-out revisions on which the best editor is measured at the end
    final_inputs: int = 200  # control inputs of that measurement
    checkpoint_seconds: float = 60.0
    tracker: str | None = None  # such as tensorboard
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise InputError("; ".join(problems))
        if self.editor is None:
            object.__setattr__(self, "editor", editor_config_class(self.method)())
        if self.together > 1:
            object.__setattr__(self, "edits", self.together)
            object.__setattr__(self, "ridge", None)  # a merge is a least-squares solve itself, and learns its own ridge

    @property
    def constraints(self) -> tuple[str, ...]:
        return CONSTRAINTS[self.constraint]

    @property
    def candidates(self) -> int:
        """Returns the number of rows per control input: its prediction alone, or all candidates of its beam."""
        return 5 if self.kl_over == "beam" else 1

    @property
    def paraphrases_per_edit(self) -> int:
        return 0 if self.paraphrases == "none" else self.paraphrase_rows

    @property
    def controls_per_edit(self) -> int:
        if "kl" not in self.constraints:
            return 0
        return max(0, self.rows - 1 - self.paraphrases_per_edit) // self.candidates


def editor_config_class(method: str) -> type[Any]:
    """Returns the config class of a method's editors.

    Raises an InputError if the method is unknown or cannot be trained.
    """
    found = find_method(method)
    if not found.trainable:
        trainable = ", ".join(name for name, known in METHODS.items() if known.trainable)
        raise InputError(f"method={method} cannot be trained; choose one of {trainable}")
    return found.load_class().config_class


def _problems(config: TrainConfig) -> Iterator[str]:
    """Yields all problems of a config whose values have the right types."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    try:
        editor_config_class(config.method)
    except InputError as error:
        yield str(error)
    for key, allowed in CHOICES.items():
        for value in values[key] if isinstance(values[key], tuple) else (values[key],):
            if value not in allowed:
                yield f"{key}={value} must be one of {', '.join(choice for choice in allowed if choice)}"
    for key in MIXTURES:
        if not values[key] or len(set(values[key])) < len(values[key]):
            yield f"{key} must name at least one choice, and each only once"
    for key in POSITIVE:
        if values[key] is not None and not 0 < values[key] < float("inf"):
            yield f"{key}={values[key]} must be above 0"
    for key in NOT_NEGATIVE:
        if not values[key] >= 0:
            yield f"{key}={values[key]} must not be below 0"
    for key in ("label_smoothing", "anneal_above"):
        if not 0 <= values[key] < 1:
            yield f"{key}={values[key]} must be at least 0 and below 1"
    for margin, floor in (("margin", "margin_floor"), ("lp_margin", "lp_margin_floor")):
        if values[margin] < values[floor]:
            yield f"{margin}={values[margin]} must not be below {margin}_floor={values[floor]}"
    if config.ema is not None and not 0 < config.ema < 1:
        yield f"ema={config.ema} must be above 0 and below 1"
    if config.holdout < 2:
        yield f"holdout={config.holdout} must be at least 2"
    if config.seed >= 2**63:
        yield f"seed={config.seed} must be below 2**63"
    if not config.margin_factor < 1:
        yield f"margin_factor={config.margin_factor} must be below 1"
    controls = len(config.others) * config.candidates if config.constraint in ("kl", "both") else 0
    needed = 1 + config.paraphrases_per_edit + controls
    if config.rows < needed:
        yield f"rows={config.rows} must be at least {needed}: an input, its paraphrases and control inputs of each kind"
    if config.split > config.edits:
        yield f"split={config.split} must not be above edits={config.edits}"
    if not config.layers:
        yield "layers must name at least one block or pattern"
    if config.together > 1 and (config.updates > 1 or config.split > 1 or config.constraint not in ("kl", "none")):
        yield f"together={config.together} needs updates=1, split=1 and the constraint kl or none"


def resolve_config(
    preset: str | None, path: str | Path | None, settings: Sequence[str], overrides: Mapping[str, Any]
) -> TrainConfig:
    """Combines a preset, a TOML file, `key=value` settings and command-line options; later ones win.

    All problems are reported in one error.
    """
    problems: list[str] = []
    sources = [preset_values(preset)] if preset else []
    if path is not None:
        sources.append(read_toml(Path(path), PRESETS))
    sources.append(read_settings(settings, problems))
    sources.append({key: value for key, value in overrides.items() if value is not None})
    return _config(merged(sources), problems)


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}


def _config(values: Mapping[str, Any], problems: list[str]) -> TrainConfig:
    """Builds a config from these values. The error for bad values also lists the known problems."""
    try:
        nested = {"editor": editor_config_class(str(values.get("method", "hyper")))}
    except InputError:
        nested = {}  # reported together with the config's other problems
        values = {key: value for key, value in values.items() if key != "editor"}
    found = typed(TrainConfig, values, problems, nested)
    try:
        config = TrainConfig(**found)
    except InputError as error:
        raise InputError("; ".join([*problems, str(error)])) from None
    if problems:
        raise InputError("; ".join(problems))
    return config
