"""The command `factpatch edit`, and the options for facts that `factpatch ledger add` shares with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import MAX_UPDATES, Device, Json, Model, Seed, SkipBad, Template, at_least, escape
from factpatch.cli.evaluate_options import MethodOptions
from factpatch.cli.methods import Editor, Method, ProtectedInputs, check_method, fit_method, load_method
from factpatch.cli.others import MAX_OTHERS, MaxOthers
from factpatch.errors import InputError
from factpatch.facts import FactEdit, read_numbered_edits, same
from factpatch.files import check_writable

if TYPE_CHECKING:
    from factpatch.editors import EditMethod
    from factpatch.models import TaskModel

Input = Annotated[str | None, typer.Option(help="The question or claim to edit.")]
Target = Annotated[str | None, typer.Option(help="The answer or label that the model should give.")]
Facts = Annotated[Path | None, typer.Option(help='File of many edits: one {"input": ..., "target": ...} per line.')]

PREDICTED_PER_BATCH = 256  # facts; a bad one is reported before those after it are predicted


def edit(
    model: Model,
    editor: Editor = None,
    method: Method = None,
    setting: MethodOptions = None,
    input: Input = None,
    target: Target = None,
    facts: Facts = None,
    max_updates: Annotated[
        int, at_least(1, "Repeat the update until the new answer is likely, at most N times. 1 makes a single update.")
    ] = MAX_UPDATES,
    others: ProtectedInputs = None,
    max_others: MaxOthers = MAX_OTHERS,
    save: Annotated[
        Path | None, typer.Option(help="The patch file to write; with --facts a new folder for all patches.")
    ] = None,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Save the patches of failed edits too, and exit with 0.")
    ] = False,
    skip_bad: SkipBad = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Change a model's answer to one input, or to many inputs with one patch each. The model's files do not change.

    Failed edits are counted and not saved. If all edits fail, the exit status is 1; if some succeed, it is 0.

    Example: factpatch edit --model world --editor world --input "What is the capital of Burundi?" --target Gitega
    """
    check_asked(input, target, facts)
    options = check_method(editor, method, setting)
    asked, bad = read_numbered_edits(facts, skip_bad) if facts else ([("", FactEdit(x=str(input), a=str(target)))], 0)
    if save and facts:
        common.refuse_used_folder(save, "--save")
        check_writable(save / "patch")
    elif save:
        common.refuse_existing_file(save, "--save")

    start = time.perf_counter()
    with common.working("loading"):
        task_model = common.load(model, device, seed, template)
        chosen = load_method(task_model, editor, method, options, max_updates)
        chosen = fit_method(chosen, task_model, others, max_others)
    edits = _usable(task_model, asked, skip_bad)
    bad += len(asked) - len(edits)

    def patch_path(number: int, success: bool) -> Path | None:
        if save is None or not (success or keep_failed):
            return None
        return save / f"{number:05}.safetensors" if facts else save

    results = _edit_all(task_model, chosen, edits, patch_path)
    failed = sum(not result["success"] for result in results)
    seconds = time.perf_counter() - start
    if not as_json:
        _show(results)
    elif facts:
        counts = {"success": 1 - failed / len(results), "failed": failed, "bad": bad}
        common.print_json({**counts, "edits": results, "seconds": seconds})
    else:
        common.print_json({**results[0], "seconds": seconds})
    if failed:
        which, was = (f"{failed} of {len(results)} edits", "were") if facts else ("The edit", "was")
        unsaved = f" and {was} not saved" if save and not keep_failed else ""
        advice = (
            common.failed_edit_advice(max_updates) if editor else "Try more steps (--set steps=300) or a higher lr."
        )
        common.warn(f"{which} failed{unsaved}. {advice}")
    if failed == len(results) and not keep_failed:
        raise typer.Exit(1)


def check_asked(input: str | None, target: str | None, facts: Path | None) -> None:
    if (facts is None) == (input is None) or (input is None) != (target is None):
        raise typer.BadParameter("give either --input and --target, or --facts")


def _usable(model: TaskModel, asked: list[tuple[str, FactEdit]], skip_bad: bool) -> list[FactEdit]:
    """Returns the edits that the model can make, with its current answers.

    The first edit that it cannot make raises an InputError; with `skip_bad`, such edits are skipped.
    """
    usable: list[FactEdit] = []
    with common.progress_bar("predicting", len(asked)) as advance:
        for first in range(0, len(asked), PREDICTED_PER_BATCH):
            part = asked[first : first + PREDICTED_PER_BATCH]
            for (position, _), resolved in zip(part, model.resolve_each([edit for _, edit in part]), strict=True):
                if isinstance(resolved, FactEdit):
                    usable.append(resolved)
                elif not skip_bad:
                    advice = f"{position}: {resolved}; fix it, or skip bad records with --skip-bad"
                    raise InputError(advice) if position else resolved
            advance(len(part))
    if not usable:
        raise InputError(f"none of the {len(asked)} facts can be edited; leave out --skip-bad to see why")
    return usable


def _edit_all(
    model: TaskModel, method: EditMethod, edits: list[FactEdit], patch_path: Callable[[int, bool], Path | None]
) -> list[dict[str, Any]]:
    """Makes the edits and returns their results. Each patch is saved to `patch_path(number, success)`, if not None."""
    results: list[dict[str, Any]] = []
    size = method.edits_per_batch(model)  # how many patches are in memory together
    with common.progress_bar("editing", len(edits)) as advance:
        for first in range(0, len(edits), size):
            patches = method.propose(model, edits[first : first + size])
            answers = model.predict_patched(patches, [patch.edits[0].x for patch in patches])
            for patch, answer in zip(patches, answers, strict=True):
                asked = patch.edits[0]
                success = same(answer, asked.a)
                if path := patch_path(len(results) + 1, success):
                    patch.save(path)
                about = {"input": asked.x, "before": asked.y, "after": answer, "target": asked.a, "success": success}
                results.append({**about, "rank": patch.rank, "norm": patch.norm(), "patch": path and str(path)})
            advance(len(patches))
    return results


def _show(results: list[dict[str, Any]]) -> None:
    table = Table("input", "before", "after", "target", "success", "rank", "norm")
    for result in results:
        texts = (escape(result[key]) for key in ("input", "before", "after", "target"))
        success = "[green]yes[/]" if result["success"] else "[red]NO[/]"
        table.add_row(*texts, success, str(result["rank"]), f"{result['norm']:.3g}")
    common.stdout.print(table)
    if saved := [result for result in results if result["patch"]]:
        more = f" and {len(saved) - 1} more" if len(saved) > 1 else ""
        failed = sum(not result["success"] for result in saved)
        warning = f", although {'the edit' if len(saved) == 1 else f'{failed} of these edits'} failed" if failed else ""
        common.stdout.print(f"Saved {escape(saved[0]['patch'])}{more}{warning}.", soft_wrap=True)
