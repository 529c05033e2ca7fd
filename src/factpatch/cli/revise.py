"""The command `factpatch revise`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from factpatch.cli import common
from factpatch.cli.common import Data, Device, Json, Model, Precision, Seed, SkipBad, Template


def revise(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(help="The revision file to write.")],
    targets: Annotated[
        Literal["beam", "gold"],
        typer.Option(
            help="Answers to edit to, where the data names none: beam (the model's own alternatives) or gold (the "
            "correct answer, with every human paraphrase)."
        ),
    ] = "beam",
    precision: Precision = None,
    skip_bad: SkipBad = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a revision file: what a model predicts, and what it can be edited to. `train` and `evaluate` read it.

    The revision file has one line per input: the model's prediction, the
    alternative answers it can be edited to give, and the paraphrases that get
    the same prediction. It can be used with this model only.
    If the command is interrupted, rerun it to resume.

    In the counts, `bad` are records that were skipped by --skip-bad and
    `left_out` are claims labelled NOT ENOUGH INFO (unless that is a label of
    the model).

    Example: factpatch revise --model runs/fever --data fever/dev.jsonl --output runs/fever-dev.jsonl
    """
    start = time.perf_counter()
    with common.working("loading"):
        from factpatch.data.records import count_records, refuse_overwriting
        from factpatch.data.revise import revise as write_revisions
        from factpatch.device import find_dtype

        refuse_overwriting(output, data)
        total = count_records(data, skip_bad)
        task_model = common.load(model, device, seed, template, find_dtype(precision, device))
    with common.progress_bar("revising", total) as advance:
        result = write_revisions(task_model, data, output, skip_bad, advance, gold=targets == "gold")
    result["seconds"] = time.perf_counter() - start
    common.print_result(result, output, as_json)
