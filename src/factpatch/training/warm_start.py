"""Starting from an editor that is already trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from factpatch.editors import TrainableEditor, load_editor
from factpatch.errors import MismatchError
from factpatch.models import TaskModel
from factpatch.patch import hash_tensors


def load_weights(editor: TrainableEditor, folder: str | Path, model: TaskModel) -> str:
    """Copies the weights of a trained editor into a new one of the same kind and size; returns their hash."""
    trained = load_editor(folder, model.device)
    trained.check_fits(model)
    found, wanted = _settings(trained), _settings(editor)
    differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if differing:
        changes = ", ".join(f"{key} is {found.get(key)} there, {wanted.get(key)} here" for key in differing)
        raise MismatchError(f"the editor in {folder} has other settings: {changes}; use the same, or leave --init out")
    if trained.shapes != editor.shapes:
        raise MismatchError(
            f"the editor in {folder} edits other weights: {len(trained.shapes)} there, {len(editor.shapes)} here; "
            "set layers as it was trained, or leave --init out"
        )
    editor.load_state_dict(trained.state_dict())
    return hash_tensors(trained.state_dict())


def _settings(editor: TrainableEditor) -> dict[str, object]:
    return {"method": editor.name, **{f"editor.{key}": value for key, value in asdict(editor.config).items()}}
