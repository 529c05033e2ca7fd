"""EditMethod: anything that turns facts into patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from factpatch.deltas import Delta
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches


class EditMethod(Protocol):
    """The one interface of all methods. The model leaves `propose` as it came, even if `propose` raises."""

    @property
    def name(self) -> str:
        """The name under which the method is registered."""
        ...

    def at_once(self, model: TaskModel) -> int:
        """How many edits are best made and run side by side."""
        ...

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        """One patch per edit, each made independently of the others."""
        ...

    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        """The patches of all edits as one stack per weight, ready to run side by side.

        Methods that have the stacks before they have patches override this.
        """
        return stack_patches(self.propose(model, edits), model.layers)

    def describe(self, model: TaskModel) -> dict[str, Any]:
        """The settings that tell this method from others of its name, for result files."""
        ...
