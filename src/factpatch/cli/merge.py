"""The command `factpatch patch merge`, and the options that other merging commands share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, escape
from factpatch.cli.others import MaxOthers, Others, read_others
from factpatch.facts import FactEdit, same
from factpatch.files import check_writable

if TYPE_CHECKING:
    from factpatch.covariance import Covariance
    from factpatch.models import TaskModel

MAX_OTHERS = 5000  # inputs that the covariance is computed from

Ridge = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Ridge of the least-squares merge: larger values protect other answers, smaller ones the facts. "
        "Default: the editor's learned value, or 1.",
    ),
]
Mode = Annotated[
    Literal["unedited", "sequence"],
    typer.Option(
        "--mode",
        metavar="MODE",
        help="unedited: solve for each weight separately, on the unedited model. sequence: solve layer by layer, "
        "which is slower but keeps more facts if the editor was not trained for merging.",
    ),
]
Refine = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="STEPS",
        help="Number of gradient steps that improve the merged patch on its facts and on --others. Slower, but "
        "loses fewer facts and other answers. 60 are usually enough.",
    ),
]
CovarianceFile = Annotated[
    Path | None,
    typer.Option(help="Cache file for the covariance of --others: read if it exists, otherwise written."),
]


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Patch files, in any order.")],
    model: Model,
    output: Annotated[Path, typer.Option(help="The file to write the merged patch to.")],
    others: Others = None,
    max_others: MaxOthers = MAX_OTHERS,
    covariance: CovarianceFile = None,
    ridge: Ridge = None,
    mode: Mode = "unedited",
    refine: Refine = 0,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="First scale each patch down to the smallest part that still succeeds.")
    ] = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Merge patches into one patch with all of their facts. Unlike their sum, it leaves most other answers unchanged.

    Example: factpatch patch merge runs/patches/*.safetensors --model world --output runs/merged.safetensors
    """
    common.refuse_existing_file(output, "--output")
    start = time.perf_counter()
    with common.working("merging"):
        from factpatch import merging, refining
        from factpatch.patch import Patch

        patches = [Patch.load(file) for file in files]
        task_model = common.load(model, device, seed, template)
        merging.check_mergeable(task_model, patches)
        other_inputs = find_covariance(task_model, covariance, others, model, max_others)
        if smallest:
            patches = merging.smallest_part(task_model, patches)
        merged = merging.merge(task_model, patches, covariance=other_inputs, ridge=ridge, mode=mode)
    if refine:
        with common.progress_bar("refining", refine) as advance:
            merged = refining.refine(
                task_model, merged, read_others(others, model, max_others), refine, lambda: advance(1)
            )
    with common.working("checking"):
        with merged.applied(task_model):
            lost = lost_facts(task_model, merged.edits)
        merged.save(output)
    if as_json:
        counts = {"facts": len(merged.edits), "lost": len(lost), "others": other_inputs.count}
        size = {"rank": merged.rank, "bytes": merged.nbytes, "seconds": time.perf_counter() - start}
        common.print_json({"output": str(output), **counts, **size})
        return
    for edit in lost:
        common.stdout.print(f"[red]does not hold:[/] {escape(edit.x)} → {escape(edit.a)}")
    held = f"{len(merged.edits) - len(lost)} of {len(merged.edits)} facts hold"
    common.stdout.print(f"Wrote {escape(str(output))}: {held}, {merged.nbytes / 1e6:.2f} MB.")
    if lost:
        common.stdout.print("Try --refine 60, --mode sequence or a smaller --ridge.")


def lost_facts(model: TaskModel, edits: Sequence[FactEdit]) -> list[FactEdit]:
    """Returns the edits whose target the model does not give."""
    answers = model.predict([edit.x for edit in edits])
    return [edit for edit, answer in zip(edits, answers, strict=True) if not same(answer, edit.a)]


def find_covariance(model: TaskModel, file: Path | None, others: Path | None, name: str, most: int) -> Covariance:
    """Loads the covariance from its file, or computes it from the other inputs and writes the file."""
    from factpatch.covariance import Covariance

    if file is not None and file.exists():
        covariance = Covariance.load(file)
        covariance.check_fits(model)
        return covariance
    if file is not None:
        check_writable(file)
    covariance = Covariance.compute(model, read_others(others, name, most))
    if file is not None:
        covariance.save(file)
    return covariance
