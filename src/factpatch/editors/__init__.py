"""Edit methods."""

from factpatch.editors.base import EditMethod
from factpatch.editors.finetune import BOUNDS, FineTune, GradientStep
from factpatch.editors.hypernetwork import HyperNetwork, Looped, load_editor
from factpatch.editors.network import EditorConfig

__all__ = [
    "BOUNDS",
    "EditMethod",
    "EditorConfig",
    "FineTune",
    "GradientStep",
    "HyperNetwork",
    "Looped",
    "load_editor",
]
