"""The command `factpatch report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli.common import Device, Json, Seed, escape, print_json, stdout, working
from factpatch.files import check_writable


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of factpatch evaluate and factpatch train.")],
    output: Annotated[Path, typer.Option(help="Folder for the tables and figures.")],
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make tables and figures from results. Needs the extra `plots`.

    Success: the model gives the target for the edited input.
    Equivalence: paraphrases of the input also get the target.
    Retain: control inputs, which are unrelated to the edit, keep their answers.

    Example: factpatch report runs/a runs/b --output report
    """
    start = time.perf_counter()
    with working("drawing"):
        from factpatch.device import find_device
        from factpatch.report import (
            contests,
            find_matplotlib,
            list_figures,
            main_table,
            read_runs,
            terminal_table,
            write_figures,
            write_tables,
        )

        find_device(device)
        find_matplotlib()
        evaluations, trainings = read_runs(runs)
        check_writable(output / "table.md")
        table = main_table(evaluations)
        compared = contests(evaluations, seed)
        files = write_tables(table, evaluations, compared, output)
        files += write_figures(list_figures(evaluations, trainings, compared), output)
    if as_json:
        seconds = time.perf_counter() - start
        count = len(evaluations) + len(trainings)
        print_json({"runs": count, "files": [str(file) for file in files], "seconds": seconds})
        return
    if evaluations:
        stdout.print(terminal_table(table))
    for file in files:
        stdout.print(escape(str(file)), soft_wrap=True)
