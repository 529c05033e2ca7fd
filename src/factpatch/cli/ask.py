"""The command `factpatch ask`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from factpatch.cli.common import Device, Json, Model, Seed, Template, escape, load, prepare, print_json, stdout, working


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
    with working("loading"):
        from factpatch.patch import Patch

        prepare(seed)
        patches = [Patch.load(file) for file in patch or []]
        task_model = load(model, device, template=template)
        for one in patches:
            one.check_fits(task_model)
    with working("asking"):
        answers: list[dict[str, Any]] = [
            {"question": question, "answer": answer}
            for question, answer in zip(questions, task_model.predict(questions), strict=True)
        ]
        if patches:
            with ExitStack() as stack:
                for one in patches:
                    stack.enter_context(one.applied(task_model))
                for found, answer in zip(answers, task_model.predict(questions), strict=True):
                    found["patched_answer"] = answer
    if as_json:
        print_json({"answers": answers, "patches": [str(file) for file in patch or []]})
        return
    names = ("question", "answer", "patched_answer") if patches else ("question", "answer")
    table = Table(*(name.replace("_", " ") for name in names))
    for found in answers:
        table.add_row(*(escape(found[name]) for name in names))
    stdout.print(table)
