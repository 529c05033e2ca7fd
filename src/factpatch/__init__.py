"""factpatch edits facts in language models: a fact goes in, a small reversible patch of the weights comes out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from factpatch.editors import EditMethod, EditorConfig, HyperNetwork, load_editor
    from factpatch.errors import FactpatchError
    from factpatch.facts import FactEdit
    from factpatch.ledger import Ledger
    from factpatch.merging import merge
    from factpatch.models import TaskModel, load_model
    from factpatch.patch import Patch
    from factpatch.protecting import protect
    from factpatch.refining import refine
    from factpatch.scope import Scope

__version__ = "0.1.0"

# Imported on first use, so that `import factpatch` does not wait for torch.
_HOMES = {
    "EditMethod": "factpatch.editors",
    "EditorConfig": "factpatch.editors",
    "FactEdit": "factpatch.facts",
    "FactpatchError": "factpatch.errors",
    "HyperNetwork": "factpatch.editors",
    "Ledger": "factpatch.ledger",
    "Patch": "factpatch.patch",
    "Scope": "factpatch.scope",
    "TaskModel": "factpatch.models",
    "load_editor": "factpatch.editors",
    "load_model": "factpatch.models",
    "merge": "factpatch.merging",
    "protect": "factpatch.protecting",
    "refine": "factpatch.refining",
}

__all__ = [
    "EditMethod",
    "EditorConfig",
    "FactEdit",
    "FactpatchError",
    "HyperNetwork",
    "Ledger",
    "Patch",
    "Scope",
    "TaskModel",
    "load_editor",
    "load_model",
    "merge",
    "protect",
    "refine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'factpatch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
