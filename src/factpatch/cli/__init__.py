"""The command line: one file a command, and no machine learning in any of them."""

from __future__ import annotations

import sys

import typer

from factpatch.cli import bench, demo, edit, evaluate, fit, paraphrase, patch, report, revise, split, train
from factpatch.cli.common import is_main_process
from factpatch.errors import FactpatchError

NO_MEMORY = "out of GPU memory; stop what else runs on the GPU, or use --device cpu, or a smaller model"

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
        if is_main_process():
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        if "out of memory" not in str(error):  # as torch and CUDA say, in errors of several kinds
            raise
        print(f"error: {NO_MEMORY}", file=sys.stderr)
        sys.exit(1)


def _number_loops(arguments: list[str]) -> list[str]:
    """`--loop` alone means five updates at most; typer options cannot leave their value out."""
    numbered: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        numbered += [argument, "5"] if argument == "--loop" and not following.isdecimal() else [argument]
    return numbered
