"""factpatch demo"""

from __future__ import annotations

import time

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from factpatch.cli.common import Device, Json, Seed, prepare, print_json, stderr, stdout


def demo(device: Device = None, seed: Seed = 0, as_json: Json = False) -> None:
    """Build a tiny model and its editor on the spot, patch an outdated fact, and measure what happened.

    Example: factpatch demo
    """
    start = time.perf_counter()
    from factpatch import demo as world
    from factpatch.device import find_device

    find_device(device)
    prepare(seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        tasks: dict[str, int] = {}

        def note(message: str, share: float) -> None:
            if message not in tasks:
                tasks[message] = progress.add_task(message, total=1)
            progress.update(tasks[message], completed=share)

        built = world.build(seed, note)
    result = {**world.run(built, seed), "seconds": time.perf_counter() - start}
    if as_json:
        print_json(result)
        return
    table = Table(
        "question", "before", "after", "in other words", "other answers kept", title="Facts edited, each with one patch"
    )
    for change in result["changes"]:
        mark = " (made up)" if change["made_up"] else ""
        after = f"[{'green' if change['success'] else 'red'}]{change['after']}[/]{mark}"
        kept = f"{change['kept']} of {change['of']}"
        table.add_row(change["question"], change["before"], after, change["other_wording_after"], kept)
    stdout.print(table)
    rates = ", ".join(f"{key} {result[key]:.3f}" for key in ("success", "equivalence", "retain"))
    stdout.print(f"In other words: {result['changes'][0]['other_wording']}")
    stdout.print(f"Over {result['edits']} edits: {rates}. Built, trained and measured in {result['seconds']:.0f} s.")
    stdout.print("Next: factpatch edit --help, factpatch bench edit")
