"""The command line: one file per command. Importing it does not import torch."""

from __future__ import annotations

import os
import re
import sys

import typer

from factpatch.cli import (
    ask,
    bench,
    demo,
    edit,
    evaluate,
    fit,
    ledger,
    paraphrase,
    patch,
    report,
    revise,
    scope,
    serve,
    share,
    split,
    train,
)
from factpatch.cli.common import is_main_process, printable
from factpatch.errors import FactpatchError

NO_MEMORY = "out of memory; stop other processes, use a smaller model or, if the GPU's memory is full, --device cpu"

INTERRUPTED = 130  # exit status after Ctrl-C, also typer's
RESUMABLE = ("evaluate", "paraphrase", "revise")  # fit and train print their own advice on resuming

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
app.command()(ask.ask)
app.command()(evaluate.evaluate)
app.command()(report.report)
app.command()(serve.serve)
app.add_typer(patch.app, name="patch")
app.add_typer(scope.app, name="scope")
app.add_typer(ledger.app, name="ledger")
app.command()(share.share)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from factpatch import __version__

        print(__version__)
        raise typer.Exit


def _is_text(argument: str) -> bool:
    """Returns True if an argument is valid Unicode: Python decodes other bytes to lone surrogates."""
    return not any(0xD800 <= ord(character) < 0xE000 for character in argument)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits: with 1 and one line on stderr after a known error, with 2 after wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if wrong := next((argument for argument in arguments if not _is_text(argument)), None):
        print(
            f"error: expected UTF-8 in the arguments, found {wrong!a}; check the terminal's encoding", file=sys.stderr
        )
        sys.exit(2)
    try:
        app(args=arguments)
    except FactpatchError as error:
        # Under `accelerate launch`, an error may occur in one process only, so its message names the process.
        where = "" if is_main_process() else f" (process {os.environ['RANK']})"
        print(f"error: {' '.join(printable(str(error)).split())}{where}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        print(f"error: {NO_MEMORY}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            raise
        if is_main_process():
            resumes = arguments and arguments[0] in RESUMABLE
            print("stopped" + "; rerun the same command to resume" * bool(resumes), file=sys.stderr)
        sys.exit(INTERRUPTED)
