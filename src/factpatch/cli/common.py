"""What every command shares: options, and where output goes. Results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. The best there is, if left out.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Model = Annotated[str, typer.Option(help="A model folder or a hub name.")]

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False))


@contextmanager
def working(message: str) -> Iterator[None]:
    """Says what is being done until it is done."""
    with stderr.status(message):
        yield


@contextmanager
def progress_bar(message: str, total: int) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        progress.add_task(message, total=total)
        yield progress


def prepare(seed: int) -> None:
    """Seeds torch and keeps transformers' own messages and bars off the screen."""
    import torch
    from transformers.utils import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
