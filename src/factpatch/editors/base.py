"""EditMethod: anything that turns facts into patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from factpatch.deltas import Delta
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches


class EditMethod(Protocol):
    """The one signature of all methods. The model leaves `propose` as it came, also when it raises."""

    @property
    def name(self) -> str: ...

    def at_once(self, model: TaskModel) -> int:
        """How many edits are best made and run side by side."""
        ...

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        """One patch for each edit, made independently of the others."""
        ...

    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        """The same as stacks by weight, to be run side by side; some methods have these before they have patches."""
        return stack_patches(self.propose(model, edits), model.layers)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        """What tells it from others of its name: which layers it changes, and settings of its own."""
        ...
