"""factpatch patch: look at patches, and write a patched model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from factpatch.cli.common import Device, Json, Model, Seed, prepare, print_json, stdout, working
from factpatch.errors import FileError

app = typer.Typer(help="Look at patches and apply them.", no_args_is_help=True)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A patch file.")],
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Which facts a patch edits, which layers it changes, and by how much.

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
        "rank": patch.rank,
        "norm": patch.norm(),
        "bytes": patch.nbytes,
    }
    if as_json:
        print_json({"edits": [edit.to_dict() for edit in patch.edits], **summary, "layers": layers})
        return
    for edit in patch.edits:
        stdout.print(f"[bold]{escape(edit.x)}[/]  {escape(edit.y or '')} → [green]{escape(edit.a)}[/]")
    table = Table("weight", "shape", "form", "rank", "norm")
    for layer in layers:
        shape = "×".join(map(str, layer["shape"]))
        table.add_row(layer["weight"], shape, layer["form"], str(layer["rank"]), f"{layer['norm']:.3g}")
    stdout.print(table)
    stdout.print(
        f"{len(layers)} weights, rank at most {patch.rank}, norm {summary['norm']:.3g}, {patch.nbytes / 1e6:.2f} MB, "
        f"by {patch.method}, for weights {patch.base[:12]}"
    )


@app.command()
def apply(
    files: Annotated[list[Path], typer.Argument(help="Patch files, in the order to apply them.")],
    model: Model,
    output: Annotated[Path, typer.Option(help="The folder to write the patched model to.")],
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write the patched model as an ordinary Hugging Face folder.

    Example: factpatch patch apply gitega.safetensors --model world --output runs/patched
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileError(f"expected a new or empty folder, found {output} in use; choose another --output")
    with working("applying"):
        from factpatch.models import load_model
        from factpatch.patch import Patch

        prepare(seed)
        patches = [Patch.load(file) for file in files]
        task_model = load_model(model, device)
        for patch in patches:
            patch.apply(task_model)
        task_model.save(output)
    if as_json:
        print_json({"patches": [str(file) for file in files], "model": model, "output": str(output)})
    else:
        stdout.print(
            f"Wrote {escape(str(output))}: {escape(model)} with {len(patches)} patch{'es' * (len(patches) > 1)}"
        )
