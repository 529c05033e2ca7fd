"""Revisions ⟨x, y, a, Pˣ⟩: what training and evaluation know about each input of one model.

A revision file begins with a provenance record, which names the model that made the file, its data and its
settings. The predictions are valid for that model only, so the file is refused for any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from factpatch import world
from factpatch.data.formats import PROVENANCE, neighbour_objects
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit, normalize, same
from factpatch.jsonl import read_jsonl, required_text, text_list
from factpatch.models import TaskModel


@dataclass(frozen=True)
class Neighbour:
    """An input that is easily confused with the edited one, and whose prediction must stay.

    It asks for the same relation of another subject, or for another relation of the same subject.
    """

    input: str
    prediction: str


@dataclass(frozen=True)
class Revision:
    """One input, the model's prediction for it, and the answers and paraphrases to edit and test it with."""

    id: str
    input: str
    prediction: str
    alternatives: tuple[str, ...]  # answers the model could be edited to give, most likely first
    rephrases: tuple[str, ...]  # generated paraphrases that get the same prediction
    human_rephrases: tuple[str, ...]  # paraphrases written by people that get the same prediction
    answers: tuple[str, ...]  # correct answers according to the data
    neighbours: tuple[Neighbour, ...] = ()
    subject: str | None = None  # the part of the input that names what the fact is about, if the data says so
    relation: str | None = None  # such as "capital"; facts of one relation have answers of one kind
    target: str | None = None  # the alternative that the data names, if it names one

    def to_json(self) -> str:
        optional = ("neighbours", "subject", "relation", "target")
        return json.dumps({k: v for k, v in asdict(self).items() if v or k not in optional}, ensure_ascii=False)


@dataclass(frozen=True)
class Provenance:
    """The model, data and settings that a revision file was made with."""

    model: str  # the model's identity
    data: str  # sha256 of the data file, or the name of the data set on the hub
    settings: dict[str, Any]  # such as the precision, and the template of a decoder's prompts

    def to_json(self) -> str:
        return json.dumps({PROVENANCE: asdict(self)}, ensure_ascii=False)

    def check_model(self, model: TaskModel, path: str | Path) -> None:
        """Raises a MismatchError if another model, or the same with another template, made the file."""
        template = self.settings.get("template")
        if self.model != model.identity and template != model.prompt_template:
            raise MismatchError(
                f"{path} was made with the template {template or 'none'!r}, this model is used with "
                f"{model.prompt_template or 'none'!r}; give the same --template"
            )
        if self.model != model.identity:
            raise MismatchError(
                f"{path} was made by model {self.model[:12]}, this is model {model.identity[:12]}; "
                "make a file for this model with factpatch revise"
            )


class RevisionFile:
    """The revisions of a file that is to be used with `model`, read again in every iteration.

    Raises a MismatchError if another model made the file. A file without a provenance record, such as one written by
    hand, is accepted with a warning, and its lines are bad if the model cannot read their inputs. With `on_bad`, bad
    lines are skipped and reported to it. Warnings and bad lines are reported once, in the first iteration.
    """

    def __init__(
        self,
        path: str | Path,
        model: TaskModel,
        on_bad: Callable[[str], object] | None = None,
        warn: Callable[[str], object] = lambda message: None,
    ):
        self.path, self.model, self.on_bad, self.warn = path, model, on_bad, warn

    def __iter__(self) -> Iterator[Revision]:
        on_bad, warn = self.on_bad, self.warn
        self.on_bad = None if on_bad is None else lambda message: None
        self.warn = lambda message: None
        records = _read(self.path, on_bad, lambda revision: self.model.check_input(revision.input))
        first = next(records, None)
        if isinstance(first, Provenance):
            first.check_model(self.model, self.path)
        elif first is not None:
            warn(f"{self.path} has no provenance record; its predictions are taken as this model's")
        yield from (record for record in chain([first], records) if isinstance(record, Revision))


def load_revisions(
    path: str | Path,
    model: TaskModel,
    on_bad: Callable[[str], object] | None = None,
    warn: Callable[[str], object] = lambda message: None,
) -> list[Revision]:
    """Reads all revisions of a file into memory; see `RevisionFile`."""
    return list(RevisionFile(path, model, on_bad, warn))


def read_revisions(path: str | Path, on_bad: Callable[[str], object] | None = None) -> Iterator[Revision]:
    """Streams the revisions of a file without checking which model made them."""
    return (record for record in _read(path, on_bad) if isinstance(record, Revision))


def _read(
    path: str | Path,
    on_bad: Callable[[str], object] | None,
    check_unknown: Callable[[Revision], object] = lambda revision: None,
) -> Iterator[Provenance | Revision]:
    """Streams all records of a file, or of the embedded model's if the path is "world".

    All provenance records must be equal. Without any, `check_unknown` is called with each revision.
    """
    source = world.REVISIONS if path == "world" else path
    first: Provenance | Revision | None = None

    def parse(raw: dict[str, Any]) -> Provenance | Revision:
        record = _parse_provenance(raw, path) or _parse_revision(raw)
        if isinstance(record, Revision) and not isinstance(first, Provenance):
            check_unknown(record)
        return record

    for record in read_jsonl(source, parse, on_bad):
        first = first or record
        if isinstance(record, Provenance) and record != first:
            raise MismatchError(
                f"{path} mixes revisions that were made by different models, from different data or in different "
                "precisions; use a separate file for each"
            )
        yield record


def _parse_provenance(raw: dict[str, Any], path: str | Path) -> Provenance | None:
    if raw.keys() != {PROVENANCE}:
        return None
    fields = raw[PROVENANCE]
    try:
        if not isinstance(fields["settings"], dict):
            raise TypeError
        return Provenance(required_text(fields, "model"), required_text(fields, "data"), fields["settings"])
    except (KeyError, TypeError, InputError):
        # Not an InputError, which --skip-bad would skip together with the check of the model.
        raise FileError(f"{path}: its provenance record is damaged; remake it with factpatch revise") from None


def _parse_revision(raw: dict[str, Any]) -> Revision:
    texts = [required_text(raw, key) for key in ("id", "input", "prediction")]
    lists = [text_list(raw, key) for key in ("alternatives", "rephrases", "human_rephrases", "answers")]
    about = {key: required_text(raw, key) for key in ("subject", "relation", "target") if raw.get(key) is not None}
    neighbours = (Neighbour(required_text(n, "input"), required_text(n, "prediction")) for n in neighbour_objects(raw))
    return Revision(*texts, *lists, neighbours=tuple(neighbours), **about)


def measured_texts(revision: Revision) -> tuple[str, ...]:
    """Returns the texts that an edit is measured on besides the control inputs: x, its paraphrases, its neighbours."""
    neighbours = (one.input for one in revision.neighbours)
    return (revision.input, *revision.rephrases, *revision.human_rephrases, *neighbours)


def own_forms(revision: Revision) -> frozenset[str]:
    """Returns the normalised texts of the input and all its paraphrases.

    An input whose normalised text is among them asks for the edited fact itself, so it is not a control input.
    """
    return frozenset(map(normalize, (revision.input, *revision.rephrases, *revision.human_rephrases)))


def teachable(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """Returns all revisions, but only with alternatives that the model can give and does not predict."""
    valid = model.valid_targets([text for revision in revisions for text in revision.alternatives])
    return [
        replace(r, alternatives=tuple(t for t in r.alternatives if t in valid and not same(t, r.prediction)))
        for r in revisions
    ]


def editable(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """Returns the revisions that have at least one teachable alternative."""
    return [revision for revision in teachable(model, revisions) if revision.alternatives]


def edit_of(revision: Revision) -> FactEdit:
    """Returns the edit from the model's prediction to its most likely alternative."""
    return FactEdit(revision.input, revision.alternatives[0], revision.prediction, revision.subject)


def hash_revisions(*parts: Sequence[Revision]) -> str:
    """Returns the sha256 of lists of revisions."""
    lines = [[revision.to_json() for revision in part] for part in parts]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
