"""EditMethod: anything that turns facts into patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar, Protocol, Self

from factpatch.data.revisions import Revision
from factpatch.deltas import Delta
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches


class EditMethod(Protocol):
    """The interface of all edit methods. `propose` leaves the model unchanged, even if it raises.

    Other threads that use the model wait while a method edits it.
    """

    needs_sample: ClassVar[bool] = False  # whether `calibrated` must be called before the method is used

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("propose", "changes", "propose_together", "calibrated"):
            if name in vars(cls):
                setattr(cls, name, _exclusive(vars(cls)[name]))

    @property
    def name(self) -> str:
        """The name under which the method is registered."""
        ...

    def edits_per_batch(self, model: TaskModel) -> int:
        """Returns the number of edits to make and run in one batch."""
        ...

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        """Returns one patch per edit, each made independently of the others."""
        ...

    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        """Returns the changes of all edits as one stack per weight, ready to run in one batch.

        Methods that compute the stacks directly override this.
        """
        return stack_patches(self.propose(model, edits), model.layers)

    def calibrated(self, model: TaskModel, sample: Sequence[Revision]) -> Self:
        """Returns the method, fitted to revisions that are not measured. Most methods need no fitting."""
        return self

    def propose_together(self, model: TaskModel, edits: Sequence[FactEdit]) -> Patch:
        """Returns one patch for all edits, if the method has its own way of editing many facts at once."""
        raise InputError(f"the method {self.name} edits one fact at a time; merge its patches with --merge solve")

    def describe(self, model: TaskModel) -> dict[str, Any]:
        """Returns the settings that distinguish this method from others of the same name, for result files."""
        ...


def _exclusive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps one of an edit method's functions so that it holds the model's lock."""

    @wraps(function)
    def locked(self: EditMethod, model: TaskModel, *args: Any, **kwargs: Any) -> Any:
        with model.lock:
            return function(self, model, *args, **kwargs)

    return locked


def check_above_zero(method: EditMethod, *options: str) -> None:
    """Raises an InputError if one of a method's options is not a finite number above 0."""
    wrong = [f"{key}={getattr(method, key)}" for key in options if not 0 < getattr(method, key) < float("inf")]
    if wrong:
        raise InputError(f"the method {method.name} needs options above 0, found {', '.join(wrong)}")
