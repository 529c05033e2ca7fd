"""The command line: one file a command, and no machine learning in any of them."""

from __future__ import annotations

import os
import re
import sys

import typer

from factpatch.cli import bench, demo, edit, evaluate, fit, paraphrase, patch, report, revise, scope, split, train
from factpatch.cli.common import is_main_process
from factpatch.errors import FactpatchError

NO_MEMORY = "out of memory; stop what else runs there, use --device cpu if it is the GPU's, or a smaller model"

INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    name="factpatch",
    help="Correct facts in language models with small, reversible patches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(split.split)
app.command()(fit.fit)
app.command()(paraphrase.paraphrase)
app.command()(revise.revise)
app.command()(train.train)
app.command()(edit.edit)
app.command()(evaluate.evaluate)
app.command()(report.report)
app.add_typer(patch.app, name="patch")
app.add_typer(scope.app, name="scope")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        from factpatch import __version__

        print(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Exit 0; 1 with one line on stderr for a known error; 2 for wrong usage."""
    try:
        app(args=_number_loops(sys.argv[1:] if arguments is None else arguments))
    except FactpatchError as error:
        # All processes of `accelerate launch` may find the same mistake, or one alone.
        where = "" if is_main_process() else f" (process {os.environ['RANK']})"
        print(f"error: {' '.join(str(error).split())}{where}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        print(f"error: {NO_MEMORY}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED and is_main_process():
            print("stopped; run again, commands that write lines go on where they were", file=sys.stderr)
        raise


def _number_loops(arguments: list[str]) -> list[str]:
    """`--loop` alone means five updates at most; typer options cannot leave their value out."""
    numbered: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        numbered += [argument, "5"] if argument == "--loop" and not following.isdecimal() else [argument]
    return numbered
