"""Sharing: an editor, a patch or a ledger as a folder for the Hugging Face hub, with a generated model card."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from factpatch import hub
from factpatch.editors import TrainableEditor
from factpatch.errors import FileError
from factpatch.facts import FactEdit
from factpatch.files import atomic_folder
from factpatch.fingerprints import split_base
from factpatch.patch import Patch

CARD, LEDGER = "README.md", "facts.db"
MOST_FACTS = 100  # listed in a card
EXPLANATIONS = {
    "success": "edited inputs that get the new answer",
    "equivalence": "their paraphrases that get the new answer",
    "equivalence_human": "their human paraphrases that get the new answer",
    "retain": "other inputs that keep their answer",
}

Kind = Literal["editor", "patch", "ledger"]


@dataclass(frozen=True)
class Card:
    """The content of a model card."""

    kind: Kind
    name: str  # on the hub, such as ada/facts
    model: str  # the base model: its name on the hub, "world", or a phrase
    fingerprint: str  # of the base model
    data: str  # what it was made from and measured on
    figures: Mapping[str, float | None]  # rates from 0 to 1
    facts: Sequence[FactEdit] = ()

    def to_markdown(self) -> str:
        on_hub = self.model.count("/") == 1
        header = ["library_name: factpatch", "tags: [knowledge-editing, model-editing]"]
        header += [f"base_model: {self.model}"] if on_hub else []
        parts = [
            "---\n" + "\n".join(header) + "\n---",
            f"# {self.name}",
            INTRODUCTIONS[self.kind],
            f"- **Base model:** {'the one embedded in factpatch' if self.model == 'world' else self.model}. "
            f"It fits only weights with the fingerprint `{split_base(self.fingerprint)[0]}`.\n"
            f"- **Data:** {_escaped(self.data)}",
            "## Load it\n\n" + HOW_TO_LOAD[self.kind].format(model=self._model_arguments(), name=self.name),
            "## Figures\n\n" + self._figures(),
            *([f"## Facts\n\n{self._facts()}"] if self.facts else []),
        ]
        return "\n\n".join(parts) + "\n"

    def _model_arguments(self) -> str:
        template = split_base(self.fingerprint)[1]
        name = json.dumps(self.model)
        return name if template is None else f"{name}, template={json.dumps(template, ensure_ascii=False)}"

    def _figures(self) -> str:
        rows = [
            f"| {name.replace('_', ' ')} | {self.figures[name]:.3f} | {meaning} |"
            for name, meaning in EXPLANATIONS.items()
            if self.figures.get(name) is not None
        ]
        return "\n".join(["| metric | value | meaning |", "|---|---|---|", *rows]) if rows else "Not measured."

    def _facts(self) -> str:
        rows = [f"| {' | '.join(map(_escaped, (f.x, f.y or '', f.a)))} |" for f in self.facts[:MOST_FACTS]]
        more = len(self.facts) - MOST_FACTS
        table = "\n".join(["| input | before | now |", "|---|---|---|", *rows])
        return table + (f"\n\n{more:,} more facts are not listed here." if more > 0 else "")


INTRODUCTIONS: dict[Kind, str] = {
    "editor": "A factpatch editor: it turns a fact into a small, reversible patch of its base model's weights.",
    "patch": "A factpatch patch: a small, reversible change of its base model's weights that corrects facts.",
    "ledger": "A factpatch ledger: facts of its base model over time, any of which can be removed again.",
}
HOW_TO_LOAD: dict[Kind, str] = {
    "editor": """```python
import factpatch as fp

model, editor = fp.load_model({model}), fp.load_editor("hub:{name}")
patch, = editor.propose(model, [fp.FactEdit(x="...", a="...")])
patch.apply(model)
```""",
    "patch": """```python
import factpatch as fp

model = fp.load_model({model})
fp.Patch.load("hub:{name}").apply(model)
```""",
    "ledger": """```
hf download {name} facts.db --local-dir .
factpatch ledger list --ledger facts.db
```

```python
import factpatch as fp

model = fp.load_model({model})
with fp.Ledger("facts.db", model) as ledger:
    ledger.patch().apply(model)
```""",
}


def share(source: TrainableEditor | Patch | Path, card: Card, folder: str | Path) -> None:
    """Writes a folder with an editor, a patch or a ledger (given by its path), and its model card."""
    with atomic_folder(folder) as scratch:
        if isinstance(source, TrainableEditor):
            source.write_to(scratch)
        elif isinstance(source, Patch):
            source.save(scratch / hub.PATCH)
        else:
            copy_ledger(source, scratch / LEDGER)
        (scratch / CARD).write_text(card.to_markdown(), encoding="utf-8")


def copy_ledger(source: Path, target: Path) -> None:
    """Copies a SQLite file as of its last transaction, even if a process is writing to it."""
    try:
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
    except sqlite3.Error as error:
        raise FileError(f"cannot copy the ledger {source}: {error}; check the path") from error


def _escaped(text: str) -> str:
    """Escapes a text for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
