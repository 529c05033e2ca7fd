"""Revisions ⟨x, y, a, Pˣ⟩: what training and evaluation know about each input of one model.

A revision file begins with a record of its provenance: which model made it, from which data, with which settings. The
predictions in it mean nothing to another model, so a file made by another model is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from factpatch.errors import InputError, MismatchError
from factpatch.facts import FactEdit, normalize, same
from factpatch.jsonl import read_jsonl, required_text, text_list
from factpatch.models import TaskModel

PROVENANCE = "provenance"  # the key of a file's first record


@dataclass(frozen=True)
class Revision:
    """An input with all that training and evaluation need to know of it, as `factpatch revise` writes it."""

    id: str
    input: str
    prediction: str  # the model's own
    alternatives: tuple[str, ...]  # what it could be edited to say, most likely first
    rephrases: tuple[str, ...]  # generated; the model says the same to each
    human_rephrases: tuple[str, ...]  # written by people; likewise
    answers: tuple[str, ...]  # gold

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Provenance:
    """Where a revision file comes from."""

    model: str  # the model's identity
    data: str  # sha256 of the data file
    settings: dict[str, Any]  # such as the precision

    def to_json(self) -> str:
        return json.dumps({PROVENANCE: asdict(self)}, ensure_ascii=False)

    def check_model(self, model: TaskModel, path: str | Path) -> None:
        """Raises a MismatchError if another model made the file."""
        if self.model != model.identity:
            raise MismatchError(
                f"{path} was made by model {self.model[:12]}, this is model {model.identity[:12]}; "
                "make a file for this model with factpatch revise"
            )


def read_provenance(path: str | Path) -> Provenance | None:
    """The provenance of a revision file, or None for a file written by hand."""
    first = next(read_jsonl(path, lambda record: record, on_bad=lambda message: None), {})
    found = first.get(PROVENANCE)
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise InputError(f"{path}: the provenance record is damaged; make the file again with factpatch revise")
    return Provenance(required_text(found, "model"), required_text(found, "data"), found["settings"])


def read_revisions(path: str | Path, on_bad: Callable[[str], object] | None = None) -> Iterator[Revision]:
    """Streams the revisions of a file."""
    found = read_jsonl(path, lambda record: None if PROVENANCE in record else _parse_revision(record), on_bad)
    return (revision for revision in found if revision is not None)


def load_revisions(
    path: str | Path,
    model: TaskModel,
    on_bad: Callable[[str], object] | None = None,
    warn: Callable[[str], object] = lambda message: None,
) -> list[Revision]:
    """Reads a revision file that is to be used with `model`.

    Raises a MismatchError if another model made the file. A file without a provenance record, such as one written by
    hand, is accepted after a call of `warn`. With `on_bad`, bad lines are skipped and reported to it.
    """
    provenance = read_provenance(path)
    if provenance is None:
        warn(f"{path} does not say which model made it; its predictions are recomputed")
    else:
        provenance.check_model(model, path)
    return list(read_revisions(path, on_bad))


def own_forms(revision: Revision) -> frozenset[str]:
    """Returns the normalised texts of the input and all its paraphrases."""
    return frozenset(map(normalize, (revision.input, *revision.rephrases, *revision.human_rephrases)))


def _parse_revision(record: dict[str, Any]) -> Revision:
    lists = [text_list(record, key) for key in ("alternatives", "rephrases", "human_rephrases", "answers")]
    return Revision(
        required_text(record, "id"), required_text(record, "input"), required_text(record, "prediction"), *lists
    )


def teachable(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """All revisions, each with those alternatives only that the model can say, and does not say already."""
    sayable = model.sayable([text for revision in revisions for text in revision.alternatives])

    def teachable_of(r: Revision) -> tuple[str, ...]:
        return tuple(text for text in r.alternatives if text in sayable and not same(text, r.prediction))

    return [replace(revision, alternatives=teachable_of(revision)) for revision in revisions]


def editable(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """The revisions that can be edits."""
    return [revision for revision in teachable(model, revisions) if revision.alternatives]


def edit_of(revision: Revision) -> FactEdit:
    """To the likeliest alternative."""
    return FactEdit(x=revision.input, y=revision.prediction, a=revision.alternatives[0])
