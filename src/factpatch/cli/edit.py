"""factpatch edit"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from factpatch.cli.common import Device, Json, Model, Seed, SkipBad, prepare, print_json, progress_bar, stdout, working
from factpatch.errors import FileError, InputError
from factpatch.facts import FactEdit, read_edits, same
from factpatch.files import check_writable

if TYPE_CHECKING:
    from factpatch.models import TaskModel
    from factpatch.patch import Patch


def edit(
    model: Model,
    editor: Annotated[str, typer.Option(help="The folder of an editor trained for this model, or world.")],
    input: Annotated[str | None, typer.Option(help="The question or claim to edit.")] = None,
    target: Annotated[str | None, typer.Option(help="What the model should say to it.")] = None,
    facts: Annotated[
        Path | None, typer.Option(help='JSON lines of {"input": ..., "target": ...}, each an edit.')
    ] = None,
    loop: Annotated[int, typer.Option(min=1, help="Update until it takes, at most N times; 5 if N is left out.")] = 1,
    save: Annotated[
        Path | None, typer.Option(help="Where to write the patch; with --facts a folder of patches.")
    ] = None,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Change what a model says to one input, or to many, each with its own patch. The model's files stay as they are.

    Example: factpatch edit --model world --editor world --input "What is the capital of Burundi?" --target Gitega
    """
    if (facts is None) == (input is None) or (input is None) != (target is None):
        raise typer.BadParameter("give either --input and --target, or --facts")
    edits, bad = read_edits(facts, skip_bad) if facts else ([FactEdit(x=str(input), a=str(target))], 0)
    if save and facts and save.exists() and not save.is_dir():
        raise FileError(f"expected a folder for the patches of --facts, found a file at {save}; name a folder")
    if save:
        check_writable(save / "patch" if facts else save)

    start = time.perf_counter()
    with working("loading"):
        from factpatch.editors import Looped, load_editor
        from factpatch.models import load_model

        prepare(seed)
        task_model = load_model(model, device)
        method = Looped(load_editor(editor, task_model.device), loop)
        edits, unusable = _usable(task_model, edits, skip_bad)
    results: list[dict[str, Any]] = []
    size = method.at_once(task_model)  # as many patches as are in memory together
    with progress_bar("editing", len(edits)) as advance:
        for first in range(0, len(edits), size):
            patches = method.propose(task_model, edits[first : first + size])
            after = task_model.predict_patched(patches, [patch.edits[0].x for patch in patches])
            for patch, said in zip(patches, after, strict=True):
                path = save / f"{len(results) + 1:05}.safetensors" if save and facts else save
                if path is not None:
                    patch.save(path)
                results.append({**_outcome(patch, said), "patch": path and str(path)})
            advance(len(patches))

    seconds = time.perf_counter() - start
    if not as_json:
        _show(results, looped=loop > 1)
    elif facts:
        success = sum(r["success"] for r in results) / len(results)
        print_json({"success": success, "edits": results, "bad": bad + unusable, "seconds": seconds})
    else:
        print_json({**results[0], "seconds": seconds})


def _usable(model: TaskModel, edits: list[FactEdit], skip_bad: bool) -> tuple[list[FactEdit], int]:
    """The edits, resolved; or, passing over what is no edit of this model, the others and how many were not."""
    try:
        return model.resolve(edits), 0
    except InputError:
        if not skip_bad:
            raise
    usable: list[FactEdit] = []
    for edit in edits:
        with suppress(InputError):
            usable += model.resolve([edit])
    if not usable:
        raise InputError(f"expected at least one fact that the model can be edited to, found none of {len(edits)}")
    return usable, len(edits) - len(usable)


def _outcome(patch: Patch, said: str) -> dict[str, Any]:
    asked = patch.edits[0]
    about = {"input": asked.x, "before": asked.y, "after": said, "target": asked.a, "success": same(said, asked.a)}
    return {**about, "rank": patch.rank, "norm": patch.norm()}


def _show(results: list[dict[str, Any]], looped: bool) -> None:
    table = Table("input", "before", "after", "target", "took", "rank", "norm")
    for r in results:
        took = "[green]yes[/]" if r["success"] else "[red]no[/]"
        texts = (escape(r[key]) for key in ("input", "before", "after", "target"))
        table.add_row(*texts, took, str(r["rank"]), f"{r['norm']:.3g}")
    stdout.print(table)
    if not looped and not all(r["success"] for r in results):
        stdout.print("An edit that did not take may with more updates: add --loop.")
    saved = [r["patch"] for r in results if r["patch"]]
    if saved:
        stdout.print(f"Saved {escape(saved[0])}" + (f" and {len(saved) - 1} more" if len(saved) > 1 else ""))
