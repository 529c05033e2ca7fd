"""The command `factpatch patch export`, and what `factpatch ledger export --peft` shares with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, escape
from factpatch.cli.others import MAX_OTHERS, ComparedInputs, MaxOthers, Wordings, evenly_spaced, read_wordings
from factpatch.facts import normalize

if TYPE_CHECKING:
    from factpatch.models import TaskModel
    from factpatch.patch import Patch

Rank = Annotated[
    int | None,
    typer.Option(
        metavar="R",
        help="Rank of the adapter: 8, 16, 32, 64, 128, 256, 320 or 512. A change of a higher rank is truncated. "
        "Default: the lowest of these that keeps the whole change.",
    ),
]


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A patch file.")],
    model: Model,
    output: Annotated[Path, typer.Option(help="A new folder for the adapter.")],
    rank: Rank = None,
    others: ComparedInputs = None,
    max_others: MaxOthers = MAX_OTHERS,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a patch as a LoRA adapter, which PEFT, vLLM and llama.cpp can load, and measure what a lower rank costs.

    Example: factpatch patch export gitega.safetensors --model world --output runs/gitega-lora --rank 8
    """
    common.refuse_used_folder(output, "--output")
    with common.working("exporting"):
        from factpatch.export import check_rank
        from factpatch.patch import Patch

        check_rank(rank)
        patch = Patch.load(file)
        task_model = common.load(model, device, seed, template)
        exported = export_adapter(patch, task_model, output, rank, *read_wordings(others, model), max_others)
    show_export(exported, as_json)


def export_adapter(
    patch: Patch,
    model: TaskModel,
    output: Path,
    rank: int | None,
    paraphrases: Wordings,
    others: Sequence[str],
    max_others: int,
) -> dict[str, Any]:
    """Writes the adapter and returns its figures, with the metrics of the patch before and after truncation."""
    from factpatch.evaluation.patches import measure_patches
    from factpatch.export import Adapter

    patch.check_fits(model)
    adapter = Adapter.of(patch.deltas, rank)
    measured = [patch] if adapter.kept == 1 else [patch, replace(patch, deltas=adapter.deltas)]
    sample = control_inputs(patch, others, max_others)
    before, *after = measure_patches(model, measured, paraphrases, sample)
    adapter.save(output, model.model)
    return {
        "output": str(output),
        "rank": adapter.rank,
        "weights": len(adapter.deltas),
        "bytes": sum(file.stat().st_size for file in output.iterdir()),
        "kept": adapter.kept,
        "edits": len(patch.edits),
        "retain_inputs": len(sample),
        "before": before,
        "after": after[0] if after else before,
    }


def control_inputs(patch: Patch, others: Sequence[str], most: int) -> list[str]:
    """Returns an evenly spaced sample of the inputs that the patch does not edit."""
    edited = {normalize(edit.x) for edit in patch.edits}
    return evenly_spaced([text for text in others if normalize(text) not in edited], most)


def show_export(exported: dict[str, Any], as_json: bool) -> None:
    if as_json:
        common.print_json(exported)
        return
    lost = 100 * (1 - exported["kept"])
    kept = f"all but {lost:.2g} % of the change's squared norm" if lost else "the whole change"
    common.stdout.print(
        f"Wrote {escape(exported['output'])}: a LoRA adapter of rank {exported['rank']} for {exported['weights']} "
        f"weights, {exported['bytes'] / 1e6:.2f} MB. It keeps {kept}."
    )
    table = Table(
        "", "patch", "adapter", title=f"edits: {exported['edits']}, other inputs: {exported['retain_inputs']}"
    )
    for name, before in exported["before"].items():
        table.add_row(name, *("–" if rate is None else f"{rate:.3f}" for rate in (before, exported["after"][name])))
    common.stdout.print(table)
