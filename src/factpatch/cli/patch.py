"""The commands `factpatch patch`: inspect, apply, merge and export patches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from factpatch.cli import common, export, merge
from factpatch.cli.common import Device, Json, Model, Seed, Template, escape
from factpatch.errors import MismatchError

app = typer.Typer(help="Inspect, apply, merge and export patches.", no_args_is_help=True)
app.command()(merge.merge)
app.command()(export.export)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A patch file.")],
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Show which facts a patch edits, which layers it changes, and by how much.

    Example: factpatch patch show gitega.safetensors
    """
    from factpatch.device import find_device
    from factpatch.patch import Patch

    find_device(device)
    patch = Patch.load(file)
    layers = [
        {
            "weight": name,
            "shape": list(delta.shape),
            "form": type(delta).__name__,
            "rank": delta.rank,
            "norm": float(delta.norm()),
        }
        for name, delta in patch.deltas.items()
    ]
    summary = {
        "method": patch.method,
        "base": patch.base,
        "template": patch.template,
        "rank": patch.rank,
        "norm": patch.norm(),
        "bytes": patch.nbytes,
    }
    if as_json:
        common.print_json({"edits": [edit.to_dict() for edit in patch.edits], **summary, "layers": layers})
        return
    for edit in patch.edits:
        common.stdout.print(f"[bold]{escape(edit.x)}[/]  {escape(edit.y or '')} → [green]{escape(edit.a)}[/]")
    table = Table(Column("weight", overflow="fold"), "shape", "form", "rank", "norm")
    for layer in layers:
        shape = "×".join(map(str, layer["shape"]))
        table.add_row(escape(layer["weight"]), shape, layer["form"], str(layer["rank"]), f"{layer['norm']:.3g}")
    common.stdout.print(table)
    common.stdout.print(
        f"{len(layers)} weights, rank at most {patch.rank}, norm {summary['norm']:.3g}, {patch.nbytes / 1e6:.2f} MB, "
        f"made by {escape(patch.method)} for weights {escape(patch.base[:12])}"
    )


@app.command()
def apply(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Patch files, in the order to apply them.")],
    model: Model,
    output: Annotated[Path, typer.Option(help="A new folder for the patched model.")],
    force: Annotated[
        bool, typer.Option("--force", help="Write the model even if some of the patches' facts do not hold.")
    ] = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a patched model as an ordinary Hugging Face folder, after checking that every patched fact holds.

    Example: factpatch patch apply gitega.safetensors --model world --output runs/patched
    """
    common.refuse_used_folder(output, "--output")
    with common.working("applying"):
        from factpatch.patch import Patch

        patches = [Patch.load(file) for file in files]
        task_model = common.load(model, device, seed, template)
        for patch in patches:
            patch.apply(task_model)
        facts = [edit for patch in patches for edit in patch.edits]
        lost = merge.lost_facts(task_model, facts)
        problem = f"{len(lost)} of {len(facts)} facts do not hold in the patched model"
        if lost and not force:
            remedy = "merge them with factpatch patch merge" if len(patches) > 1 else "make the patch again"
            raise MismatchError(f"{problem}; {remedy}, or write the model anyway with --force")
        task_model.save(output)
    if lost:
        common.warn(problem)
    if as_json:
        names = {"patches": [str(file) for file in files], "model": model, "output": str(output)}
        common.print_json({**names, "facts": len(facts), "lost": len(lost)})
        return
    count = f"{len(patches)} patch{'es' * (len(patches) > 1)}"
    common.stdout.print(f"Wrote {escape(str(output))}: {escape(model)} with {count}.")
