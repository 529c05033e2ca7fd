"""The fact in the prompt: every input is preceded by the new fact. This needs no editing, and nothing is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from factpatch.editors.base import EditMethod
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch


@dataclass(frozen=True)
class FactInPrompt(EditMethod):
    """Puts the new fact before each input, for evaluation only: there are no weights to change and no patch."""

    form: str = "{x} {a}. {input}"
    name = "prompt"

    def __post_init__(self) -> None:
        if not isinstance(self.form, str) or any(self.form.count(part) != 1 for part in ("{x}", "{a}", "{input}")):
            raise InputError(f"expected a form with {{x}}, {{a}} and {{input}}, once each, found {self.form!r}")

    def edits_per_batch(self, model: TaskModel) -> int:
        return 8

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {"layers": "none", "form": self.form}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        raise InputError("the method prompt changes no weights, so it has no patches; use another method")

    def prompts(self, edit: FactEdit, inputs: Sequence[str]) -> list[str]:
        """Puts the fact before each input."""
        parts = re.split(r"(\{x\}|\{a\}|\{input\})", self.form)  # texts may contain braces, so they are filled in once
        fact = {"{x}": edit.x, "{a}": edit.a}
        return ["".join({**fact, "{input}": text}.get(part, part) for part in parts) for text in inputs]
