"""factpatch bench: how fast editing is, beside the published way and beside the frozen model alone."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from factpatch.cli.common import Device, Json, Seed, prepare, print_json, progress_bar, stdout, working

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `edit` a subcommand while it is the only one."""


@app.command()
def edit(
    shape: Annotated[str, typer.Option(help="bert-base, bart-base, minilm or marian.")] = "bert-base",
    edits: Annotated[int, typer.Option(min=1, help="Edits at once.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each edit's forward.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, max=512, help="Tokens of each row; claims have about 16.")] = 16,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16. bf16 on a GPU, if left out.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 5,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Propose plus one edited forward for each edit, no optimizer.

    Example: factpatch bench edit --shape bert-base --edits 8 --rows 8
    """
    with working("building"):
        from factpatch import bench

        prepare(seed)
        model = bench.shaped_model(shape, device, precision)
    with progress_bar(f"{shape} on {model.device}", total=4 * (repeats + 1)) as bar:
        times = bench.bench_edit(model, edits, rows, tokens, repeats, tick=lambda: bar.advance(bar.task_ids[0]))
    settings = {
        "shape": shape,
        "rows": rows,
        "tokens": tokens,
        "device": str(model.device),
        "precision": str(model.model.dtype),
    }
    summary = times.summary(edits)
    if as_json:
        print_json({**settings, **summary})
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
