"""factpatch evaluate"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from factpatch.cli.common import (
    Device,
    Json,
    Model,
    Seed,
    SkipBad,
    is_main_process,
    prepare,
    print_json,
    progress_bar,
    show_counts,
    working,
)
from factpatch.errors import InputError
from factpatch.files import check_writable

if TYPE_CHECKING:
    from factpatch.data.revisions import Revision
    from factpatch.editors import EditMethod
    from factpatch.models import TaskModel


def evaluate(
    model: Model,
    data: Annotated[str, typer.Option(help="Revisions to edit, as revise writes them.")],
    output: Annotated[Path, typer.Option(help="The folder for summary.json, edits.jsonl and what figures need.")],
    method: Annotated[
        Literal["hyper", "finetune", "zhu", "gradient"],
        typer.Option(help="hyper: a trained editor. finetune, zhu: the baselines. gradient: one step."),
    ] = "hyper",
    editor: Annotated[
        str | None, typer.Option(help="The folder of an editor trained for this model, or world.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Of the baselines: all, a block's name, or block to have --select choose one.")
    ] = "all",
    bound: Annotated[float | None, typer.Option(help="Of zhu: how far a weight may move.")] = None,
    select: Annotated[
        bool, typer.Option("--select", help="Choose the block and the bound on other revisions; see --valid.")
    ] = False,
    valid: Annotated[
        str | None,
        typer.Option(help="Revisions to choose on, such as train's. Those of --data that are not edited, if left out."),
    ] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="Edits, sampled; all, if left out.")] = None,
    retain: Annotated[int | None, typer.Option(min=1, help="Other inputs, sampled; all, if left out.")] = None,
    loop: Annotated[int, typer.Option(min=1, help="Update until it takes, at most N times; 5 if N is left out.")] = 1,
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="fp32 or bf16. bf16 for an editor of a classifier on a GPU, fp32 otherwise, if left out."),
    ] = None,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure an edit method: success, what stays, paraphrases, and accuracy lost.

    Run it again after a kill and it goes on where it stopped. Several processes share the work, by accelerate launch.

    Example: factpatch evaluate --model runs/qa --editor runs/qa-editor --data dev.jsonl --output runs/qa-dev
    """
    _check_options(method, editor, layers, bound, select, valid, loop)
    check_writable(output)
    with working("loading"):
        from factpatch.data.revisions import read_revisions
        from factpatch.device import find_device
        from factpatch.evaluation import evaluate as run
        from factpatch.evaluation import precise, sampled
        from factpatch.models import load_model
        from factpatch.processes import join_processes

        prepare(seed)
        bad: list[str] = []
        revisions = list(read_revisions(data, bad.append if skip_bad else None))
        to_choose_on = list(read_revisions(valid, bad.append if skip_bad else None)) if valid else None
        join_processes(find_device(device))  # each of which then has a GPU of its own
        task_model = load_model(model, device)
    with precise(task_model, precision, baseline=method != "hyper"):
        sample, others = sampled(task_model, revisions, edits, retain, seed)
        tried: list[dict[str, Any]] = []
        if select:
            edited = {revision.id for revision in sample}
            left = [revision for revision in revisions if revision.id not in edited]
            chosen, tried = _selected(task_model, method, layers, left if to_choose_on is None else to_choose_on, seed)
        else:
            chosen = _method(task_model, method, editor, layers, bound, loop)
        settings = {"model": model, "editor": editor, "data": data, "valid": valid, "seed": seed, "tried": tried}
        with progress_bar("editing", len(sample)) as advance:
            result = run(chosen, task_model, sample, others, output, settings, advance)
    if not is_main_process():
        return
    result |= {"bad": len(bad)}
    print_json(result) if as_json else show_counts(result, output)


def _check_options(
    method: str, editor: str | None, layers: str, bound: float | None, select: bool, valid: str | None, loop: int
) -> None:
    if (method == "hyper") != (editor is not None):
        raise typer.BadParameter("the method hyper needs --editor, and no other method takes one")
    if method == "zhu" and (bound is None) != select:
        raise typer.BadParameter("zhu needs either --bound or --select")
    if method != "zhu" and bound is not None:
        raise typer.BadParameter("only the method zhu has a --bound")
    if bound is not None and not 0 < bound < float("inf"):
        raise typer.BadParameter(f"expected a bound above 0, found {bound}", param_hint="--bound")
    if layers == "block" and not select:
        raise typer.BadParameter("--layers block needs --select; or name the block")
    if select and method not in ("finetune", "zhu"):
        raise typer.BadParameter("only finetune and zhu have something to --select")
    if valid and not select:
        raise typer.BadParameter("--valid is what --select chooses on; give both or neither")
    if method == "hyper" and layers != "all":
        raise typer.BadParameter("an editor changes the layers it was trained for; --layers is the baselines'")
    if method != "hyper" and loop > 1:
        raise typer.BadParameter("only the method hyper can --loop")
    if select and method == "finetune" and layers != "block":
        raise typer.BadParameter("finetune has only its block to --select: say --layers block")


def _method(
    model: TaskModel, method: str, editor: str | None, layers: str, bound: float | None, loop: int
) -> EditMethod:
    from factpatch.editors import Looped, create_method, load_editor

    if method == "hyper":
        loaded = load_editor(str(editor), model.device)
        return Looped(loaded, loop) if loop > 1 else loaded
    return create_method(method, layers=layers, bound=bound)


def _selected(
    model: TaskModel, method: str, layers: str, revisions: list[Revision], seed: int
) -> tuple[EditMethod, list[dict[str, Any]]]:
    """The baseline with the block and the bound that do best, and all that was tried.

    Of a training file the first by lot are those that `fit` held out, which the model does not know by heart.
    """
    from factpatch.data.holdout import hash_shuffled
    from factpatch.data.revisions import editable
    from factpatch.evaluation import select, tries

    others = hash_shuffled(revisions, seed)
    edits = editable(model, others)
    if len(others) < 2 or not edits:
        raise InputError("nothing is left to choose on: all revisions are edited; lower --edits, or give --valid")
    with progress_bar("choosing", tries(model, layers, method == "zhu")) as advance:
        return select(model, layers, method == "zhu", edits, others, advance)
