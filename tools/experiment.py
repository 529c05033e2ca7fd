"""Reads experiments from TOML files: their steps, the values that steps are repeated for, and dependencies."""

from __future__ import annotations

import itertools
import re
import shlex
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factpatch.errors import InputError

KEYS = {"like", "version", "variables", "steps", "tables"}
STEP_KEYS = {"name", "run", "each", "best", "by", "version"}
PLACES = ("data", "models", "out")  # names for the folders of data and models, and for what a step itself writes


class Text(string.Template):
    """Text with placeholders: $seed, or ${train.jsonl} for names with dots, dashes and slashes."""

    idpattern = r"[a-z][a-z0-9_]*"
    braceidpattern = r"[a-z][a-z0-9_./-]*"

    def fill(self, values: Mapping[str, str]) -> str:
        """Replaces the placeholders that have a value."""
        return self.safe_substitute(values)


@dataclass(frozen=True)
class Step:
    """One factpatch command, which writes one file or folder."""

    experiment: str
    group: str  # its name in the TOML file, which all steps of one `each` share
    name: str  # name of the file or folder that it writes
    run: str  # the command, in which names of steps stand for what they write
    values: Mapping[str, str] = field(default_factory=dict)  # one value for each name in `each`
    best: str | None = None  # a group of steps, the best of which gives this step its values
    by: tuple[str, ...] = ("success", "retain")  # figures whose sum decides which is best
    version: int = 1

    @property
    def key(self) -> str:
        return f"{self.experiment}/{self.name}"


@dataclass(frozen=True)
class Experiment:
    """The steps of a TOML file, and the tables to make from their results."""

    name: str
    steps: list[Step]
    tables: list[dict[str, Any]]


def read_experiments(folder: Path) -> dict[str, Experiment]:
    """Reads all TOML files of a folder, by name."""
    try:
        specs = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"an experiment in {folder} is not valid TOML: {error}; correct it") from None
    return {name: _experiment(name, _inherited(spec, specs)) for name, spec in specs.items()}


def _inherited(spec: dict[str, Any], specs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds the steps of the experiment that `like` names, if this one needs them, with this one's variables."""
    if "like" not in spec:
        return spec
    if spec["like"] not in specs:
        raise InputError(f"no experiment is called {spec['like']}; correct `like`")
    other = specs[spec["like"]]
    variables = {**other.get("variables", {}), **spec.get("variables", {})}
    known = {step["name"]: step for step in [*other["steps"], *spec.get("steps", [])]}
    wanted = [*(row["step"] for table in spec.get("tables", []) for row in table["rows"])]
    wanted += [step["name"] for step in spec.get("steps", [])]
    needed: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in known and name not in needed:
            needed.add(name)
            wanted += [*Text(_filled(known[name]["run"], variables)).get_identifiers(), known[name].get("best", "")]
    return {**spec, "steps": [step for name, step in known.items() if name in needed], "variables": variables}


def _experiment(name: str, spec: dict[str, Any]) -> Experiment:
    steps = [step for one in spec["steps"] for step in _expanded(name, one, spec)]
    variables = spec.get("variables", {})
    names = [step.name for step in steps]
    problems = [
        *(f"unknown key {key}" for key in spec.keys() - KEYS),
        *(f"unknown key {key} in a step" for one in spec["steps"] for key in one.keys() - STEP_KEYS),
        *(f"{one['name']} is a variable and a step" for one in spec["steps"] if one["name"] in variables),
        *(f"two steps are called {one}" for one in set(names) if names.count(one) > 1),
    ]
    if problems:
        raise InputError(f"experiment {name}: {'; '.join(problems)}; correct its TOML file")
    return Experiment(name, steps, spec.get("tables", []))


def _filled(run: str, variables: Mapping[str, str]) -> str:
    """Fills in the variables of a command. Variables may contain other variables."""
    for _ in variables:
        run = Text(run).fill(variables)
    return run


def _expanded(experiment: str, one: dict[str, Any], spec: dict[str, Any]) -> Iterator[Step]:
    """Yields a step for each combination of the values in its `each`."""
    each = {name: [str(value) for value in values] for name, values in one.get("each", {}).items()}
    path = Path(one["name"])
    run = _filled(one["run"], spec.get("variables", {}))
    for combination in itertools.product(*each.values()):
        values = dict(zip(each, combination, strict=True))
        parts = [path.stem, *(re.sub(r"[^\w.]+", "-", value).strip("-") for value in combination)]
        yield Step(
            experiment=experiment,
            group=one["name"],
            name="-".join(parts) + path.suffix,
            run=Text(run).fill(values),
            values=values,
            best=one.get("best"),
            by=tuple(one.get("by", Step.by)),
            version=one.get("version", spec.get("version", 1)),
        )


class Plan:
    """All steps, the paths that they read and write, and their dependencies."""

    def __init__(self, experiments: Mapping[str, Experiment], data: Path, models: Path, work: Path):
        self.data, self.models, self.work = data, models, work
        self.steps = {step.key: step for experiment in experiments.values() for step in experiment.steps}
        for step in self.steps.values():
            self.needs(step)  # refuses unknown names before anything is run

    def matching(self, step: Step, name: str) -> list[Step]:
        """Returns the steps that a name stands for: those of the group whose values agree with the step's own."""
        experiment, _, group = name.rpartition("/")
        experiment = experiment or step.experiment
        found = [other for other in self.steps.values() if (other.experiment, other.group) == (experiment, group)]
        if not found:
            raise InputError(f"{step.key}: no step is called {name}; correct its name")
        return [o for o in found if all(o.values[k] == v for k, v in step.values.items() if k in o.values)]

    def needs(self, step: Step) -> list[Step]:
        """Returns the steps that have to be finished before a step."""
        return [*self.tried(step), *self.reads(step)]

    def tried(self, step: Step) -> list[Step]:
        """Returns the candidates, of which the best gives a step its values."""
        return self.matching(step, step.best) if step.best else []

    def reads(self, step: Step) -> list[Step]:
        """Returns the steps whose output a step reads."""
        given = {*PLACES, *(name for other in self.tried(step) for name in other.values)}
        names = [name for name in Text(step.run).get_identifiers() if name not in given]
        return [other for name in names for other in self.matching(step, name)]

    def path(self, step: Step) -> Path:
        return self.work / step.experiment / step.name

    def text(self, step: Step, chosen: Mapping[str, str]) -> str:
        """Returns the command with the chosen values, but with names instead of paths."""
        return Text(step.run).fill(chosen)

    def shown(self, step: Step, chosen: Mapping[str, str] | None = None) -> str:
        """Returns the command for readers, without this machine's folders. Values not chosen yet are in capitals."""
        names = [name for other in self.tried(step) for name in other.values if name not in step.values]
        chosen = chosen or {name: name.upper() for name in names}
        return self.generalised(shlex.join(["factpatch", *self.command(step, chosen)]))

    def command(self, step: Step, chosen: Mapping[str, str]) -> list[str]:
        """Returns the arguments of factpatch. A word that names several steps becomes several words."""

        def paths(name: str) -> list[str]:
            if name == "out":
                return [str(self.path(step))]
            if name in PLACES:
                return [str(getattr(self, name))]
            return [str(self.path(other)) for other in self.matching(step, name)]

        words: list[str] = []
        for word in shlex.split(self.text(step, chosen)):
            names = Text(word).get_identifiers()
            if len(names) == 1 and word in (f"${names[0]}", f"${{{names[0]}}}") and names[0] not in PLACES:
                words += paths(names[0])
            else:
                words.append(Text(word).substitute({name: paths(name)[0] for name in names}))
        return words

    def files(self, step: Step, chosen: Mapping[str, str]) -> dict[str, Path]:
        """Returns the paths of the data and models that a step reads, by their names in the command."""
        words = [word for word in shlex.split(self.text(step, chosen)) if word.startswith(("$data", "$models"))]
        found = {word: Path(Text(word).substitute(data=self.data, models=self.models)) for word in words}
        for path in found.values():
            if not path.exists():
                raise InputError(f"expected a file or folder at {path}, found nothing; check --data and --models")
        return found

    def generalised(self, text: str) -> str:
        """Replaces this machine's folders in a text with general names."""
        for folder, name in ((self.work, "runs"), (self.data, "data"), (self.models, "models")):
            text = text.replace(f"{folder}/", f"{name}/")
        return text
