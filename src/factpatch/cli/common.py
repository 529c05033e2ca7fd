"""What every command shares: options, and where output goes. Results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. The best there is, if left out.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]
Model = Annotated[str, typer.Option(help="A model folder, a hub name, or world.")]
Data = Annotated[str, typer.Option(help="JSON lines (KILT or your own), CounterFact's JSON, or hub:NAME:SPLIT.")]
Precision = Annotated[Literal["fp32", "bf16"] | None, typer.Option(help="fp32 or bf16. bf16 on a GPU, if left out.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Pass over bad records and count them.")]

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

LOG_SECONDS = 30  # between two lines of a run that nobody watches on a terminal


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False))


@contextmanager
def working(message: str) -> Iterator[None]:
    """Says what is being done until it is done."""
    with stderr.status(message):
        yield


def announce(message: str) -> None:
    """For whoever is watching."""
    if stderr.is_terminal:
        warn(message)


def warn(message: str) -> None:
    """Also for whoever reads the log."""
    if is_main_process():
        stderr.print(escape(message), soft_wrap=True)


def is_main_process() -> bool:
    """Under `accelerate launch`, whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def show_counts(result: dict[str, Any], place: object) -> None:
    """Counts, shares and, where they are too small for percents, numbers, as a table."""
    table = Table(title=escape(str(place)), show_header=False)
    for key, value in result.items():
        if isinstance(value, float) and key.startswith(("kl", "margin")):
            table.add_row(key.replace("_", " "), f"{value:.2e}")
        elif isinstance(value, int | float):
            share = isinstance(value, float) and "second" not in key
            table.add_row(key.replace("_", " "), f"{value:.1%}" if share else f"{value:,.0f}")
    stdout.print(table)


@contextmanager
def status_bar(message: str) -> Iterator[Callable[[float | None, str], None]]:
    """A bar over a whole run, told its share, if known, and a line of figures; in a log, a line now and then."""
    told = time.monotonic()

    def log(share: float | None, figures: str) -> None:
        nonlocal told
        if time.monotonic() - told > LOG_SECONDS:
            told = time.monotonic()
            warn(f"{message} {'' if share is None else f'{share:.0%}'}  {figures}")

    if not stderr.is_terminal:
        yield log
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not is_main_process()) as progress:
        task = progress.add_task(message, total=None, figures="")
        yield lambda share, figures: progress.update(
            task, total=None if share is None else 1.0, completed=share, figures=figures
        )


@contextmanager
def progress_bar(message: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar that is told how many more are done; in a log, a line now and then."""
    done = 0
    with status_bar(message) as update:

        def advance(more: int = 1) -> None:
            nonlocal done
            done += more
            update(done / total if total else None, f"{done:,} of {total:,}" if total else f"{done:,}")

        yield advance


def prepare(seed: int) -> None:
    """Seeds torch and keeps transformers' own messages and bars off the screen."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
