"""The commands `factpatch bench`: speed of editing, training, evaluation and merging on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Precision, Seed, at_least
from factpatch.cli.merge import Mode

if TYPE_CHECKING:
    from factpatch.models import TaskModel

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Shape = Annotated[
    Literal["bert-base", "bart-base", "minilm", "marian", "smollm2", "qwen-1.5b", "llama-8b"],
    typer.Option(
        "--shape",
        metavar="NAME",
        help="Architecture to time, with random weights: bert-base, bart-base, minilm, marian, smollm2, qwen-1.5b or "
        "llama-8b.",
    ),
]
Tokens = Annotated[
    int, typer.Option(min=2, max=512, metavar="N", help="Tokens per row. FEVER claims have 13 on average.")
]
Repeats = Annotated[int, at_least(1, "Number of timed runs; the median is reported.")]

EXPLANATIONS = (
    "published implementation: one edit at a time, with dense updates of the weights",
    "frozen model alone: the same forward and backward passes without editing, which is the upper limit",
    "speedup: compared with the published implementation",
)


@app.command()
def edit(
    shape: Shape = "bert-base",
    edits: Annotated[int, at_least(1, "Edits per batch.")] = 8,
    rows: Annotated[int, at_least(1, "Rows per edit in the forward pass of the edited model.")] = 8,
    tokens: Tokens = 16,
    precision: Precision = None,
    repeats: Repeats = 5,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how long it takes to make edits and to run one edited forward pass per edit, without an optimizer.

    Takes about two minutes on two cores.

    Example: factpatch bench edit --shape bert-base --edits 8 --rows 8
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with common.status_bar(f"{shape} on {model.device}") as update:
        result: dict[str, Any] = bench.bench_edit(model, edits, rows, tokens, repeats, lambda share: update(share, ""))
    if as_json:
        common.print_json({**_about(shape, rows, tokens, model), **result})
        return
    given_back = result["memory_given_back"]
    table = Table("", "ms per edit", "edits/s", "speedup", *(["edits/s, memory\ngiven back"] if given_back else []))
    for name, key in (
        (f"{edits} edits in one batch", "edits_per_second"),
        ("one edit", "one_edit_per_second"),
        ("published implementation", "reference_edits_per_second"),
        ("frozen model alone", "limit_edits_per_second"),
    ):
        rate = result[key]
        speedup = rate / result["reference_edits_per_second"]
        cells = [f"{1000 / rate:.1f}", common.per_second(rate), f"{speedup:.2f}"]
        table.add_row(name, *cells, *([common.per_second(given_back[key])] if given_back else []))
    common.stdout.print(table)
    _explain(*EXPLANATIONS)
    if "answer_ratio" in result:
        common.stdout.print(
            f"One edit and an answer under it take {result['edit_and_answer_seconds']:.2f} s, "
            f"{result['answer_ratio']:.2f} times as long as an unedited answer and a backward pass."
        )
    if given_back:
        _explain("memory given back: free memory is returned to the operating system before each run")
    common.stdout.print(f"The low-rank factors of {edits} edits take {result['factor_bytes'] / 1e6:.1f} MB.")


@app.command()
def train(
    shape: Shape = "bert-base",
    edits: Annotated[int, at_least(1, "Edits per step.")] = 128,
    rows: Annotated[int, at_least(3, "Rows per edit.")] = 16,
    tokens: Tokens = 32,
    precision: Precision = None,
    repeats: Repeats = 20,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how long one training step of an editor takes.

    The defaults suit a GPU, where they take about a minute. On a CPU, use the options of the example.

    Example: factpatch bench train --shape minilm --edits 8 --rows 4 --repeats 3
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with common.status_bar(f"{shape} on {model.device}") as update:
        result: dict[str, Any] = bench.bench_train(model, edits, rows, tokens, repeats, lambda share: update(share, ""))
    if as_json:
        common.print_json({**_about(shape, rows, tokens, model), **result})
        return
    table = Table("", "edits/s", "speedup")
    for name, key in (
        (f"a step with {edits} edits", "edits_per_second"),
        ("published implementation", "reference_edits_per_second"),
        ("frozen model alone", "limit_edits_per_second"),
    ):
        table.add_row(name, common.per_second(result[key]), f"{result[key] / result['reference_edits_per_second']:.1f}")
    common.stdout.print(table)
    _explain(*EXPLANATIONS)
    common.stdout.print(
        f"{result['fraction_of_limit']:.0%} of the limit. The first three steps, which include all preparation, took "
        f"{result['prepare_seconds']:.1f} s. The model has {result['model_parameters'] / 1e6:,.0f} million parameters, "
        f"the editor {result['editor_parameters'] / 1e6:,.0f} million."
    )
    if result["memory_bytes"]:
        parts = f"in {result['parts']} parts" if result["parts"] > 1 else "at once"
        common.stdout.print(f"A step, run {parts}, needs at most {result['memory_bytes'] / 1e9:.1f} GB of GPU memory.")


@app.command()
def evaluate(
    shape: Shape = "minilm",
    edits: Annotated[int | None, at_least(1, "Patches per batch. Default: as many as factpatch evaluate uses.")] = None,
    rows: Annotated[int, at_least(1, "Rows per patch.")] = 128,
    tokens: Tokens = 16,
    precision: Precision = None,
    repeats: Repeats = 20,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how long a forward pass takes with many patches side by side, and without patches.

    Takes about two minutes on two cores.

    Example: factpatch bench evaluate --shape minilm --edits 8 --rows 8 --repeats 3
    """
    model = _build(shape, device, precision, seed)
    from factpatch import bench

    with common.status_bar(f"{shape} on {model.device}") as update:
        result = bench.bench_evaluate(model, edits, rows, tokens, repeats, lambda share: update(share, ""))
    if as_json:
        common.print_json({**_about(shape, rows, tokens, model), **result})
        return
    table = Table("", "rows/s")
    table.add_row(f"under {result['edits']} patches", common.per_second(result["rows_per_second"]))
    table.add_row("unedited model", common.per_second(result["unedited_rows_per_second"]))
    common.stdout.print(table)
    common.stdout.print(f"{result['fraction_of_limit']:.0%} of the unedited model's speed.")


@app.command()
def merge(
    shape: Shape = "bert-base",
    facts: Annotated[int, at_least(1, "Number of patches to merge, with one fact each.")] = 256,
    tokens: Tokens = 13,
    mode: Mode = "unedited",
    precision: Precision = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how long it takes to merge patches into one, and to compute the covariance that the merge needs.

    Takes about two minutes on two cores.

    Example: factpatch bench merge --shape minilm --facts 64
    """
    model = _build(shape, device, precision, seed)
    from factpatch.bench.merge import bench_merge

    with common.working(f"{shape} on {model.device}"):
        result = {"shape": shape, "device": str(model.device), **bench_merge(model, facts, tokens, mode)}
    common.print_result(result, shape, as_json)


def _build(shape: str, device: str | None, precision: str | None, seed: int) -> TaskModel:
    with common.working("building"):
        from factpatch.bench import shaped_model
        from factpatch.device import use_free_cores

        common.prepare(seed)
        model = shaped_model(shape, device, precision)
        use_free_cores(model)
        return model


def _about(shape: str, rows: int, tokens: int, model: TaskModel) -> dict[str, Any]:
    precision = str(model.model.dtype)
    return {"shape": shape, "rows": rows, "tokens": tokens, "device": str(model.device), "precision": precision}


def _explain(*lines: str) -> None:
    for line in lines:
        common.stdout.print(f"[dim]{line}[/]")
