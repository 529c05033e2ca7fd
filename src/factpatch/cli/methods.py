"""Options for what makes the patches, a trained editor or another method: for `edit`, `ledger add` and `serve`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factpatch.cli import common
from factpatch.cli.common import MAX_UPDATES
from factpatch.cli.evaluate_options import parse_options
from factpatch.cli.others import read_others
from factpatch.errors import InputError

if TYPE_CHECKING:
    from factpatch.editors import EditMethod
    from factpatch.models import TaskModel

Editor = Annotated[str | None, typer.Option(help='Folder of an editor trained for this model, or "world".')]
Method = Annotated[
    str | None, typer.Option(help="A method that needs no trained editor instead, such as lora or finetune.")
]
ProtectedInputs = Annotated[
    Path | None,
    typer.Option(
        help='Inputs whose answers should change as little as possible: one {"input": ...} per line, such as a '
        'revision file, or "world" for the questions of the embedded world. The methods memit and ultraedit need a '
        "revision file."
    ),
]


def check_method(editor: str | None, method: str | None, settings: list[str] | None) -> dict[str, Any]:
    """Returns the method's options, or refuses options that contradict each other, before anything is loaded."""
    if (editor is None) == (method is None):
        raise typer.BadParameter("give either --editor, or a --method that needs no trained editor")
    return parse_options(settings, method, editor, select=False)


def load_method(
    model: TaskModel,
    editor: str | None,
    method: str | None,
    options: dict[str, Any],
    max_updates: int = MAX_UPDATES,
    sure: bool = True,
) -> EditMethod:
    """Loads an editor that repeats its update until the new answer is likely, or creates a method without training.

    Without `sure`, the editor stops as soon as an edit succeeds.
    """
    from factpatch.editors import SURE, Looped, create_method, load_editor

    if editor is None:
        return create_method(str(method), **options)
    return Looped(load_editor(editor, model.device), max_updates, SURE if sure else math.inf)


def fit_method(method: EditMethod, model: TaskModel, others: Path | None, most: int) -> EditMethod:
    """Fits a method to other inputs: to make it ready if it needs that, or else to protect their answers, if given."""
    from factpatch.data.revisions import load_revisions, teachable
    from factpatch.protecting import protect

    if method.needs_sample:
        if others is None:
            raise InputError(f"the method {method.name} is fitted to other edits; name a revision file with --others")
        sample = load_revisions(str(others), model, warn=common.warn)
        return method.calibrated(model, teachable(model, sample[:most]))
    return protect(method, model, read_others(others, None, most)) if others else method
