"""Edit methods."""

from factpatch.editors.base import EditMethod
from factpatch.editors.hypernetwork import EditorConfig, HyperNetwork, load_editor

__all__ = ["EditMethod", "EditorConfig", "HyperNetwork", "load_editor"]
