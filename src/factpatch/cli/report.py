"""The command `factpatch report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Seed, escape
from factpatch.files import check_writable


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Output folders of factpatch evaluate and factpatch train.")
    ],
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
    with common.working("drawing"):
        from factpatch import report as reports
        from factpatch.device import find_device

        find_device(device)
        reports.find_matplotlib()
        evaluations, trainings = reports.read_runs(runs)
        check_writable(output / "table.md")
        table = reports.main_table(evaluations)
        contests = reports.contests(evaluations, seed)
        files = reports.write_tables(table, evaluations, contests, output)
        files += reports.write_figures(reports.list_figures(evaluations, trainings, contests), output)
    if as_json:
        result = {"runs": len(evaluations) + len(trainings), "files": [str(file) for file in files]}
        common.print_json({**result, "seconds": time.perf_counter() - start})
        return
    if evaluations:
        common.stdout.print(reports.terminal_table(table))
    for file in files:
        common.stdout.print(escape(str(file)), soft_wrap=True)
