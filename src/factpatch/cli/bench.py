"""factpatch bench: how fast editing is, beside the published way and beside the frozen model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from factpatch.cli.common import Device, Json, Precision, Seed, prepare, print_json, progress_bar, stdout, working

if TYPE_CHECKING:
    from factpatch.models import TaskModel

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Shape = Annotated[
    Literal["bert-base", "bart-base", "minilm", "marian"], typer.Option(help="bert-base, bart-base, minilm or marian.")
]
Tokens = Annotated[int, typer.Option(min=2, max=512, help="Tokens of each row; claims have about 16.")]


@app.command()
def edit(
    shape: Shape = "bert-base",
    edits: Annotated[int, typer.Option(min=1, help="Edits at once.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each edit's forward.")] = 8,
    tokens: Tokens = 16,
    precision: Precision = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 5,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Propose plus one edited forward for each edit, no optimizer.

    Example: factpatch bench edit --shape bert-base --edits 8 --rows 8
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with progress_bar(f"{shape} on {model.device}", total=4 * (repeats + 1)) as advance:
        times = bench.bench_edit(model, edits, rows, tokens, repeats, tick=advance)
    summary = times.summary(edits)
    if as_json:
        print_json({**_about(shape, rows, tokens, model), **summary})
        return
    table = Table("", "ms an edit", "edits/s", "times the reference")
    rates = {
        f"{edits} edits at once": summary["edits_per_second"],
        "1 edit alone": summary["one_edit_per_second"],
        "the published way": summary["reference_edits_per_second"],
        "the frozen model alone": summary["limit_edits_per_second"],
    }
    for name, rate in rates.items():
        speedup = rate / summary["reference_edits_per_second"]
        table.add_row(name, f"{1000 / rate:.1f}", f"{rate:.2f}", f"{speedup:.2f}")
    stdout.print(table)
    stdout.print(f"Factors of {edits} edits: {summary['factor_bytes'] / 1e6:.1f} MB")


@app.command()
def train(
    shape: Shape = "bert-base",
    edits: Annotated[int, typer.Option(min=1, help="Edits a step.")] = 128,
    rows: Annotated[int, typer.Option(min=3, help="Rows of each edit.")] = 16,
    tokens: Tokens = 32,
    precision: Precision = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps; the median counts.")] = 20,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """One step of the training loop, beside the published way with one edit and beside the frozen model alone.

    Example: factpatch bench train --shape minilm --edits 8 --rows 4 --repeats 3
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with progress_bar(
        f"{shape} on {model.device}", total=(4 if model.device.type == "cuda" else 3) * (repeats + 1)
    ) as advance:
        times = bench.bench_train(model, edits, rows, tokens, repeats, tick=advance)
    summary = {**_about(shape, rows, tokens, model), **times.summary(edits)}
    if as_json:
        print_json(summary)
        return
    table = Table("", "edits/s", "times the reference")
    for name, key in (
        (f"a step of {edits} edits", "edits_per_second"),
        ("the published way", "reference_edits_per_second"),
        ("the frozen model alone", "limit_edits_per_second"),
    ):
        table.add_row(name, f"{summary[key]:.1f}", f"{summary[key] / summary['reference_edits_per_second']:.1f}")
    stdout.print(table)
    stdout.print(
        f"{summary['fraction_of_limit']:.0%} of the limit; {summary['prepare_seconds']:.1f} s for the first three."
    )


@app.command()
def evaluate(
    shape: Shape = "minilm",
    edits: Annotated[
        int | None, typer.Option(min=1, help="Patches side by side; as many as evaluation takes, if left out.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows under each patch.")] = 128,
    tokens: Tokens = 16,
    precision: Precision = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 20,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Rows a second under patches, and of the unedited model.

    Example: factpatch bench evaluate --shape minilm --edits 8 --rows 8 --repeats 3
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with progress_bar(f"{shape} on {model.device}", total=2 * (repeats + 1)) as advance:
        found = bench.bench_evaluate(model, edits, rows, tokens, repeats, tick=advance)
    summary = {**_about(shape, rows, tokens, model), **found}
    if as_json:
        print_json(summary)
        return
    table = Table("", "rows/s")
    table.add_row(f"under {summary['edits']} patches", f"{summary['rows_per_second']:,.0f}")
    table.add_row("unedited", f"{summary['unedited_rows_per_second']:,.0f}")
    stdout.print(table)
    stdout.print(f"{summary['fraction_of_limit']:.0%} of the unedited model's speed.")


def _build(shape: str, device: str | None, precision: str | None, seed: int) -> TaskModel:
    with working("building"):
        from factpatch.bench import shaped_model

        prepare(seed)
        return shaped_model(shape, device, precision)


def _about(shape: str, rows: int, tokens: int, model: TaskModel) -> dict[str, Any]:
    precision = str(model.model.dtype)
    return {"shape": shape, "rows": rows, "tokens": tokens, "device": str(model.device), "precision": precision}
