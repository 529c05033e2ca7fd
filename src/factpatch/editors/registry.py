"""Edit methods by name. To add a method, write one file and call `register` once."""

from __future__ import annotations

import difflib
import inspect
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from factpatch import hub, world
from factpatch.editors.base import EditMethod
from factpatch.editors.trainable import TrainableEditor
from factpatch.errors import FileError, InputError
from factpatch.files import read_text


@dataclass(frozen=True)
class Method:
    """A registered edit method."""

    label: str  # as tables and figures show it
    path: str  # "module:Class", imported on first use
    trainable: bool = False

    def load_class(self) -> Any:
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)


METHODS: dict[str, Method] = {}


def register(name: str, label: str, path: str, trainable: bool = False) -> None:
    """Registers a method under a name that `edit`, `evaluate`, `train` and `report` then accept."""
    METHODS[name] = Method(label, path, trainable)


register("hyper", "KnowledgeEditor", "factpatch.editors.hypernetwork:HyperNetwork", trainable=True)
register("mend", "MEND", "factpatch.editors.mend:Mend", trainable=True)
register("finetune", "Fine-tune", "factpatch.editors.finetune:FineTune")
register("zhu", "Zhu et al.", "factpatch.editors.finetune:Zhu")
register("ultraedit", "UltraEdit", "factpatch.editors.ultraedit:UltraEdit")
register("memit", "MEMIT", "factpatch.editors.memit:Memit")
register("lora", "LoRA", "factpatch.editors.lora:LoRA")
register("prompt", "Fact in the prompt", "factpatch.editors.prompt:FactInPrompt")
register("gradient", "Gradient", "factpatch.editors.finetune:GradientStep")


def find_method(name: str) -> Method:
    """Returns the method registered under a name. For an unknown name, raises an InputError that suggests another."""
    if name in METHODS:
        return METHODS[name]
    close = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(METHODS)}"
    raise InputError(f"there is no edit method called {name!r}; {hint}")


def create_method(name: str, **options: Any) -> EditMethod:
    """Creates a method that needs no training. Options that are None are ignored."""
    method = find_method(name)
    if method.trainable:
        raise InputError(f"the method {name} is a trained editor; load it from its folder with --editor")
    given = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(method.load_class()).parameters
    known = {key: parameter for key, parameter in parameters.items() if not key.startswith("_")}
    for key in given:
        if key not in known:
            raise InputError(f"the method {name} has no option {key}; its options are {', '.join(known) or 'none'}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise InputError(f"the method {name} needs --{key}")
    return method.load_class()(**given)


def load_editor(folder: str | Path, device: str | torch.device = "cpu") -> TrainableEditor:
    """Loads a trained editor from its folder, from the folder of the run that trained it, or from the hub.

    "world" loads the editor that comes with the package. A name on the hub starts with "hub:", as in
    hub:ada/facts-editor.
    """
    place = world.EDITOR if folder == "world" else hub.locate(folder, *hub.EDITOR)
    if (place / "editor").is_dir():
        place = place / "editor"
    try:
        saved = json.loads(read_text(place / "config.json"))
        kind = saved.get("kind", "hyper")  # the first editors did not record it
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(
            f"{place} is not an editor's folder: cannot read config.json ({reason}); check the path"
        ) from error
    if not isinstance(kind, str) or kind not in METHODS or not METHODS[kind].trainable:
        known = ", ".join(name for name, method in METHODS.items() if method.trainable)
        raise FileError(f"{place} holds an editor of the unknown kind {kind!r}; known kinds: {known}")
    return METHODS[kind].load_class().load(place, device)
