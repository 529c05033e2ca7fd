"""Edit methods: trained editors, baselines and other published methods."""

from factpatch.editors.base import EditMethod
from factpatch.editors.finetune import BOUNDS, FineTune, GradientStep, Zhu
from factpatch.editors.hypernetwork import HyperNetwork
from factpatch.editors.looped import SURE, Looped
from factpatch.editors.network import EditorConfig
from factpatch.editors.registry import METHODS, create_method, find_method, load_editor, register
from factpatch.editors.trainable import Condition, EditBatch, TrainableEditor

__all__ = [
    "BOUNDS",
    "METHODS",
    "SURE",
    "Condition",
    "EditBatch",
    "EditMethod",
    "EditorConfig",
    "FineTune",
    "GradientStep",
    "HyperNetwork",
    "Looped",
    "TrainableEditor",
    "Zhu",
    "create_method",
    "find_method",
    "load_editor",
    "register",
]
