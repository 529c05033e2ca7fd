"""The command `factpatch evaluate`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import MAX_UPDATES, Device, Json, Model, Seed, SkipBad, Template, at_least, counted, escape
from factpatch.cli.evaluate_options import (
    MethodOptions,
    check_joint_options,
    check_options,
    needs_sample,
    parse_options,
    parse_sizes,
)
from factpatch.errors import InputError
from factpatch.files import check_writable, content_hash

if TYPE_CHECKING:
    from factpatch.data.revisions import Revision
    from factpatch.editors import EditMethod
    from factpatch.evaluation import Result
    from factpatch.models import TaskModel


def evaluate(
    model: Model,
    data: Annotated[str, typer.Option(help='Revision file, made by factpatch revise for this model, or "world".')],
    output: Annotated[Path, typer.Option(help="Folder for summary.json, edits.jsonl and the data for figures.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="Method that needs no training: finetune, zhu, ultraedit, lora, memit, prompt or gradient. "
            "Default: the method of --editor."
        ),
    ] = None,
    editor: Annotated[str | None, typer.Option(help='Folder of an editor trained for this model, or "world".')] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Weights that a method without training changes: all, a block's name, a pattern such as '*.mlp.*', "
            "mlp:3 for the feed-forward weights of the last 3 blocks, or block to let --select choose one. "
            "Default: the method's own choice."
        ),
    ] = None,
    setting: MethodOptions = None,
    bound: Annotated[float | None, typer.Option(help="For zhu: maximum change of each weight.")] = None,
    select: Annotated[
        bool,
        typer.Option("--select", help="For finetune and zhu: choose the block and bound that are best on --valid."),
    ] = False,
    valid: Annotated[
        str | None,
        typer.Option(
            help="Revision file for --select, such as the one for training. Default: the part of --data that is not "
            "edited."
        ),
    ] = None,
    targets: Annotated[
        Literal["beam", "gold", "relation", "invented"],
        typer.Option(
            "--targets",
            metavar="KIND",
            help="Answers to edit to: beam (the model's own alternatives), gold (the correct answers, where the model "
            "is wrong), relation (answers of other facts of the same relation) or invented (made-up names).",
        ),
    ] = "beam",
    edits: Annotated[int | None, at_least(1, "Number of edits to sample. Default: all.")] = None,
    retain: Annotated[int | None, at_least(1, "Number of control inputs to sample. Default: all.")] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Repeat an editor's update until the edit succeeds.")] = False,
    sure: Annotated[
        bool,
        typer.Option(
            "--sure",
            help="With --loop: also repeat it until the new answer is likely, as `edit` does. More paraphrases then "
            "get the new answer.",
        ),
    ] = False,
    max_updates: Annotated[
        int | None, at_least(1, "Maximum updates per edit. Default: 5 with --loop, otherwise 1.")
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(
            help="Convert updates to their least-squares form with this ridge, such as 1. They then change the answers "
            "to inputs like those of --others less."
        ),
    ] = None,
    together: Annotated[
        str | None, typer.Option(help="Also measure N facts edited together, for each N of a list such as 1,16,64.")
    ] = None,
    merge: Annotated[
        Literal["solve", "scope", "sum", "own"],
        typer.Option(
            "--merge",
            metavar="WAY",
            help="How --together puts N facts into one model: solve (merge by least squares), scope (use each patch "
            "only for inputs about its fact), sum (add the patches) or own (a joint update, for ultraedit and memit).",
        ),
    ] = "solve",
    others: Annotated[
        str | None,
        typer.Option(
            help="Revision file that --merge, --ridge, ultraedit and memit are fitted to. "
            "Default: the part of --data that is not measured."
        ),
    ] = None,
    scope: Annotated[
        str | None, typer.Option(help="For --merge scope: file of a trained scope. Default: an untrained scope.")
    ] = None,
    false_matches: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.99, help="For --merge scope: share of --others that may match a fact. Default: 0.005."
        ),
    ] = None,
    mode: Annotated[
        Literal["unedited", "sequence"],
        typer.Option(
            "--mode",
            metavar="MODE",
            help="For --merge solve: unedited solves for each weight alone, sequence layer by layer.",
        ),
    ] = "unedited",
    refine: Annotated[
        int,
        typer.Option(min=0, metavar="STEPS", help="For --merge solve: number of gradient steps on the merged patch."),
    ] = 0,
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="fp32 or bf16. Default: bf16 for editors of classifiers on a GPU, otherwise fp32."),
    ] = None,
    skip_bad: SkipBad = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure an edit method on a revision file.

    Success: the model gives the target for the edited input.
    Equivalence: paraphrases of the input also get the target.
    Retain: control inputs, which are unrelated to the edit, keep their answers.
    Deterioration: relative loss of accuracy on the control inputs.

    Rerun the same command to resume an interrupted run. With accelerate launch, several processes share the work.

    Example: factpatch evaluate --model runs/qa --editor runs/qa-editor --data dev.jsonl --output runs/qa-dev
    """
    updates = max_updates or (MAX_UPDATES if loop else 1)
    if sure and updates == 1:
        raise typer.BadParameter("--sure repeats updates; add --loop")
    check_options(method, editor, layers, bound, select, valid, updates, ridge)
    options = parse_options(setting, method, editor, select)
    sizes = parse_sizes(together)
    is_fitted = ridge is not None or needs_sample(method)
    check_joint_options(bool(sizes), merge, others, is_fitted, ridge, scope, false_matches, mode, refine)
    check_writable(output)
    with common.working("loading"):
        from factpatch.data.revisions import RevisionFile, hash_revisions, load_revisions
        from factpatch.device import find_device
        from factpatch.evaluation import MergeOptions, Together, count_measured_edits, measuring_precision, sample_edits
        from factpatch.evaluation import evaluate as run
        from factpatch.models import load_model
        from factpatch.processes import join_processes

        common.prepare(seed)
        share = {} if false_matches is None else {"false_matches": false_matches}
        joint = Together(sizes, merge, options=MergeOptions(mode, refine, scope, **share)) if sizes else None
        join_processes(find_device(device))  # before the model is loaded: each process has a GPU of its own
        task_model = load_model(model, device, template=template)
        bad: list[str] = []
        on_bad = bad.append if skip_bad else None
        # A sample is taken from the file itself. Pipes can be read only once.
        stream = edits and retain and (data == "world" or Path(data).is_file())
        revisions = (RevisionFile if stream else load_revisions)(data, task_model, on_bad, common.warn)
        to_choose_on = load_revisions(valid, task_model, on_bad, common.warn) if valid else None
        fitted_to = load_revisions(others, task_model, on_bad, common.warn) if others else None
    with measuring_precision(task_model, precision, baseline=editor is None):
        sample, controls = sample_edits(task_model, revisions, edits, retain, seed, targets)
        unused: list[Revision] = []
        if joint or is_fitted:
            unused = fitted_to if fitted_to is not None else _without(revisions, [*sample, *controls])
            unused, controls = _split_for_fitting(unused, controls, seed)
        if joint:
            joint = replace(joint, others=unused)
        tried: list[dict[str, Any]] = []
        if select:
            left = to_choose_on if to_choose_on is not None else _without(revisions, sample)
            chosen, tried = _selected(task_model, method == "zhu", layers or "all", left, targets, seed)
        else:
            chosen = _method(task_model, method, editor, {"layers": layers, "bound": bound, **options}, updates, sure)
            chosen = _fitted(chosen, task_model, unused, ridge)
        settings = {"model": model, "editor": editor, "data": data, "valid": valid, "seed": seed, "targets": targets}
        settings |= {"others": others} if others or joint or ridge is not None else {}
        settings |= {"ridge": ridge} if ridge is not None else {}
        settings |= {"scope": scope, "mode": mode, "refine": refine, **share} if joint else {}
        settings |= {"set": options} if options else {}
        settings |= {"sample_hash": hash_revisions(unused)} if needs_sample(method) else {}
        settings |= {"scope_hash": content_hash(scope)} if scope else {}
        with common.progress_bar("editing", count_measured_edits(len(sample), sizes)) as advance:
            result = run(chosen, task_model, sample, controls, output, settings, advance, joint, tried)
    if result is None:  # not the main process
        return
    if as_json:
        common.print_json({**result.to_dict(), "bad": len(bad)})
    else:
        _show(result, output, len(bad))


def _method(
    model: TaskModel, method: str | None, editor: str | None, options: dict[str, Any], updates: int, sure: bool
) -> EditMethod:
    from factpatch.editors import SURE, Looped, create_method, load_editor

    if editor is None:
        return create_method(str(method), **options)
    loaded = load_editor(editor, model.device)
    if method not in (None, loaded.name):
        raise InputError(f"{editor} holds an editor of the kind {loaded.name}, not {method}; leave --method out")
    return Looped(loaded, updates, SURE if sure else math.inf) if updates > 1 else loaded


def _without(revisions: Iterable[Revision], used: list[Revision]) -> list[Revision]:
    ids = {revision.id for revision in used}
    return [revision for revision in revisions if revision.id not in ids]


def _selected(
    model: TaskModel, bounded: bool, layers: str, revisions: list[Revision], targets: str, seed: int
) -> tuple[EditMethod, list[dict[str, Any]]]:
    """Returns the baseline with the best block and bound, and all settings that were tried.

    In a training file, the first revisions in hash order are those that `fit` held out, so the model has not
    memorised them.
    """
    from factpatch.data.holdout import hash_shuffled
    from factpatch.data.targets import with_targets
    from factpatch.evaluation import count_choices, select

    others = hash_shuffled(revisions, seed)
    edits = with_targets(model, others, [targets], seed)
    if len(others) < 2 or not edits:
        raise InputError("no revisions are left for --select: all are edited; lower --edits, or give --valid")
    with common.progress_bar("choosing", count_choices(model, layers, bounded)) as advance:
        return select(model, layers, bounded, edits, others, advance)


def _split_for_fitting(
    unused: list[Revision], controls: list[Revision], seed: int
) -> tuple[list[Revision], list[Revision]]:
    """Returns shuffled inputs to fit to, and the control inputs.

    If no input is unused, half of the control inputs are taken, so that nothing is fitted to what it is measured on.
    """
    from factpatch.data.holdout import hash_shuffled

    if not unused:
        unused, controls = controls[::2], controls[1::2]
    return hash_shuffled(unused, seed), controls


def _fitted(method: EditMethod, model: TaskModel, sample: list[Revision], ridge: float | None) -> EditMethod:
    """Fits a method to a sample of inputs, if it needs one or if there is a ridge."""
    from factpatch.data.revisions import teachable
    from factpatch.evaluation import MAX_OTHERS
    from factpatch.protecting import protect

    if method.needs_sample:
        method = method.calibrated(model, teachable(model, sample))
    if ridge is not None:
        known = {revision.input: revision.prediction for revision in sample[:MAX_OTHERS]}
        method = protect(method, model, known, known, ridge)
    return method


def _show(result: Result, output: Path, bad: int) -> None:
    from factpatch.metrics import METRICS

    table = Table("metric", "value", "95 % interval", "meaning", title=escape(str(output)))
    for key, metric in METRICS.items():
        if (value := result.metrics[key]) is None:
            continue
        interval = ", ".join(map(metric.show, result.intervals[key])) if key in result.intervals else ""
        table.add_row(metric.label, f"{metric.show(value)} {metric.unit}".strip(), interval, metric.meaning)
    common.stdout.print(table)
    for point in result.curve:
        rates = ((METRICS[key], point.result.metrics[key]) for key in ("success", "retain", "equivalence"))
        shown = ", ".join(f"{m.label.lower()} {m.show(value)} {m.unit}" for m, value in rates if value is not None)
        size = f"{counted(point.facts, 'fact')} together ({counted(point.groups, 'group')})"
        common.stdout.print(f"{size}: {shown}", soft_wrap=True)
    size = f"{counted(result.edits, 'edit')} on {counted(result.retain_inputs, 'control input')}"
    speed = f", {result.edits / result.seconds:.3g} per second" if result.seconds else ""
    skipped = f", {counted(bad, 'bad line')} skipped" if bad else ""
    common.stdout.print(f"{size}{speed}{skipped}", soft_wrap=True)
