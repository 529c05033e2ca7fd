"""EditMethod: anything that turns facts into patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Protocol, Self

import torch

from factpatch.data.revisions import Revision
from factpatch.deltas import Delta, LowRank, unstack
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch, stack_patches


class EditMethod(Protocol):
    """The interface of all edit methods. `propose` leaves the model unchanged, even if it raises.

    While a method edits a model, other threads that use the model wait. Its functions run without recording gradients
    unless they enable this themselves.
    """

    name: str  # the name under which the method is registered
    needs_sample: ClassVar[bool] = False  # whether `calibrated` must be called before the method is used

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("propose", "changes", "propose_together", "calibrated"):
            if name in vars(cls):
                setattr(cls, name, _guarded(vars(cls)[name]))

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
        """Returns the settings that distinguish this method from others of the same name, for result files.

        By default these are all public attributes, such as the fields of a dataclass.
        """
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps one of an edit method's functions so that it holds the model's lock and records no gradients.

    Inference mode is left, because gradients of its tensors could not be computed.
    """

    @wraps(function)
    def guarded(self: EditMethod, model: TaskModel, *args: Any, **kwargs: Any) -> Any:
        with model.lock, torch.inference_mode(False), torch.no_grad():
            return function(self, model, *args, **kwargs)

    return guarded


def split_stacks(
    stacks: Mapping[str, Delta],
    edits: Sequence[FactEdit],
    base: str,
    method: str,
    ridge: dict[str, float] | None = None,
) -> list[Patch]:
    """Splits stacks of low-rank changes into one patch per edit, and drops the zero rows of padding."""
    per_edit = unstack({name: stack for name, stack in stacks.items() if isinstance(stack, LowRank)})
    return [Patch({**deltas}, base, method, (edit,), ridge or {}) for edit, deltas in zip(edits, per_edit, strict=True)]


def check_above_zero(settings: Any, *names: str, subject: str | None = None) -> None:
    """Raises an InputError if one of the named settings is neither None nor a finite number above 0.

    `subject` says whose settings they are, by default a method's options.
    """
    values = {name: getattr(settings, name) for name in names}
    wrong = [f"{name}={value}" for name, value in values.items() if value is not None and not 0 < value < math.inf]
    if wrong:
        raise InputError(f"expected {subject or f'{settings.name} options'} above 0, found {', '.join(wrong)}")
