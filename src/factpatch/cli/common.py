"""Options, messages and progress bars that the commands share. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from factpatch.errors import FileError
from factpatch.files import check_writable, checked_target

if TYPE_CHECKING:
    import torch

    from factpatch.models import TaskModel

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if one is available, otherwise the CPU.")
]
Model = Annotated[
    str,
    typer.Option(help='Model folder, GGUF file, model name on the Hugging Face hub, or "world" for the embedded one.'),
]
Template = Annotated[
    str | None,
    typer.Option(
        help="Prompt of a decoder: a text with {} for the question, chat for the tokenizer's chat template, or none "
        "for the question alone. Default: the template recorded in the model's folder, or else none."
    ),
]
Data = Annotated[str, typer.Option(help="JSON lines (KILT or your own), CounterFact's JSON file, or hub:NAME:SPLIT.")]
Precision = Annotated[
    Literal["fp32", "bf16"] | None, typer.Option(help="fp32 or bf16. Default: bf16 on a GPU, fp32 on the CPU.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip bad records and count them.")]


def at_least(least: int, help: str) -> Any:
    """Returns an option for a number N with a minimum."""
    return typer.Option(min=least, metavar="N", help=help)


def check_seed(seed: int | None) -> int | None:
    """Checks the range of a seed. The option has no min and max, because help would show all 19 digits of the max."""
    if seed is not None and not 0 <= seed < 2**63:
        raise typer.BadParameter(f"expected a number from 0 to 2^63 - 1, found {seed}")
    return seed


Seed = Annotated[int, typer.Option(callback=check_seed, metavar="N", help="Random seed.")]

MAX_UPDATES = 5  # equals editors.looped.MAX_UPDATES, whose import would load torch

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

LOG_SECONDS = (1, 30)  # where stderr is not a terminal: time before the first line of progress, and between lines

EXPLANATIONS = {
    "bad": "bad: records that could not be used and were skipped (--skip-bad).",
    "left_out": "left out: claims labelled NOT ENOUGH INFO, which are neither true nor false.",
}


def escape(text: str) -> str:
    """Escapes text from a file or a model, so that neither rich nor the terminal interprets any of it."""
    return escape_markup(printable(text))


def printable(text: str) -> str:
    """Replaces control characters, which could move the cursor or hide text, with \\x1b and the like."""
    return "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False))


def print_result(result: dict[str, Any], title: object, as_json: bool) -> None:
    """Prints the numbers of a result as JSON or as a table."""
    if as_json:
        print_json(result)
    else:
        show_counts(result, title)


def working(message: str) -> AbstractContextManager[object]:
    """Shows a message with a spinner while a block runs, once for all processes."""
    return stderr.status(message) if is_main_process() else nullcontext()


def announce(message: str) -> None:
    """Prints a message if stderr is a terminal; it is not written to logs."""
    if stderr.is_terminal:
        warn(message)


def warn(message: str) -> None:
    """Prints a message to stderr, once for all processes."""
    if is_main_process():
        stderr.print(escape(message), soft_wrap=True)


def is_main_process() -> bool:
    """Returns True in the process that prints, out of those that `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def program() -> str:
    """Returns the command that starts factpatch in this shell, even if its environment is not activated."""
    if shutil.which("factpatch"):
        return "factpatch"
    return sys.argv[0] if Path(sys.argv[0]).name == "factpatch" else f"{sys.executable} -m factpatch"


def refuse_used_folder(folder: Path, option: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"expected a new or empty folder, found {folder} in use; choose another {option}")


def refuse_existing_file(file: Path, option: str) -> None:
    """Refuses a file that exists, or that could not be written after long work."""
    if checked_target(file).exists():
        raise FileError(f"expected a new file, but {file} exists; delete it, or choose another {option}")
    check_writable(file)


def failed_edit_advice(max_updates: int) -> str:
    more = max(MAX_UPDATES, 2 * max_updates)
    return f"Try, in this order: more updates (--max-updates {more}), another wording, a larger model."


def show_counts(result: dict[str, Any], title: object) -> None:
    """Prints the numbers of a result as a table, and explains the names in EXPLANATIONS."""
    table = Table(title=escape(str(title)), show_header=False)
    for key, value in result.items():
        if isinstance(value, int | float):
            table.add_row(key.replace("held_out", "held-out").replace("_", " "), format_number(key, value))
    stdout.print(table)
    for key, explanation in EXPLANATIONS.items():
        if result.get(key):
            stdout.print(explanation)


def format_number(name: str, value: float) -> str:
    """Formats a number by its name and type: yes or no, count, duration, rate per second, divergence or share."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith("per_second"):
        return per_second(value)
    if name.endswith("seconds"):
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    return f"{value:.2e}" if name.startswith(("kl", "margin")) else f"{value:.1%}"


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: 1 fact, 1,024 facts."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def per_second(rate: float) -> str:
    """Formats a rate with at least two significant digits, so that a slow one does not become 0."""
    digits = max(0, 1 - math.floor(math.log10(rate))) if rate > 0 else 0
    return f"{rate:,.{digits}f}"


@contextmanager
def status_bar(message: str) -> Iterator[Callable[[float | None, str], None]]:
    """Shows a run's progress: yields a function to call with the share done, if known, and a line of figures.

    A terminal shows a bar with the elapsed and remaining time; a log gets a line every LOG_SECONDS[1] seconds.
    """
    start = time.monotonic()
    due = start + LOG_SECONDS[0]

    def left(share: float | None) -> str:
        if not share:
            return ""
        seconds = (time.monotonic() - start) * (1 / share - 1)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"

    def log(share: float | None, figures: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_SECONDS[1]
            done = "" if share is None else f" {share:.0%},"
            warn(f"{message}{done} {left(share)}  {figures}")

    if not stderr.is_terminal:
        yield log
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),  # pulses until the share that is done is known
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}  {task.fields[figures]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not is_main_process()) as progress:
        task = progress.add_task(message, total=None, left="", figures="")
        yield lambda share, figures: progress.update(
            task, total=1.0 if share else None, completed=share, left=left(share), figures=figures
        )


@contextmanager
def progress_bar(message: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` items are done: yields a function to call with the number of items just finished."""
    done = 0
    with status_bar(message) as update:

        def advance(more: int = 1) -> None:
            nonlocal done
            done += more
            update(done / total if total else None, f"{done:,} of {total:,}" if total else f"{done:,}")

        advance(0)
        yield advance


def prepare(seed: int) -> None:
    """Seeds torch and silences the messages and progress bars of transformers."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)


def load(
    name: str, device: str | None, seed: int, template: str | None = None, dtype: torch.dtype | None = None
) -> TaskModel:
    """Seeds torch, loads a model and limits torch's threads to the free cores."""
    from factpatch.device import use_free_cores
    from factpatch.models import load_model

    prepare(seed)
    model = load_model(name, device, dtype, template=template)
    use_free_cores(model)
    return model
