"""The command `factpatch ask`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, escape


def ask(
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help="Questions or claims.")],
    model: Model,
    patch: Annotated[list[Path] | None, typer.Option(help="A patch to apply; may be given several times.")] = None,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Ask a model questions, and compare its answers with and without patches. The model's files do not change.

    Example: factpatch ask --model world "What is the capital of Burundi?" "What is the capital of Kenya?"
    """
    with common.working("loading"):
        from factpatch.patch import Patch

        patches = [Patch.load(file) for file in patch or []]
        task_model = common.load(model, device, seed, template)
        for loaded in patches:
            loaded.check_fits(task_model)
    with common.working("asking"), ExitStack() as stack:
        answers = {"question": questions, "answer": task_model.predict(questions)}
        for loaded in patches:
            stack.enter_context(loaded.applied(task_model))
        if patches:
            answers["patched_answer"] = task_model.predict(questions)
    rows = list(zip(*answers.values(), strict=True))
    if as_json:
        records = [dict(zip(answers, row, strict=True)) for row in rows]
        common.print_json({"answers": records, "patches": [str(file) for file in patch or []]})
        return
    table = Table(*(name.replace("_", " ") for name in answers))
    for row in rows:
        table.add_row(*map(escape, row))
    common.stdout.print(table)
