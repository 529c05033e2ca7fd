"""Edit methods."""

from factpatch.editors.base import EditMethod
from factpatch.editors.hypernetwork import EditorConfig, HyperNetwork, Looped, load_editor

__all__ = ["EditMethod", "EditorConfig", "HyperNetwork", "Looped", "load_editor"]
