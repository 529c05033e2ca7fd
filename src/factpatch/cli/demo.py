"""factpatch demo"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from factpatch.cli.common import Device, Json, Seed, prepare, print_json, progress_bar, stdout, working

SHOWN = 30  # changes that the table has room for


def demo(
    fact: Annotated[
        tuple[str, str] | None, typer.Option(metavar="QUESTION ANSWER", help="Teach it this fact instead.")
    ] = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Patch what has changed since 2018 in the embedded model, and measure what each patch does.

    Example: factpatch demo --fact "What is the capital of Australia?" Sydney
    """
    start = time.perf_counter()
    with working("loading"):
        from factpatch import demo as world_demo
        from factpatch.editors import load_editor
        from factpatch.models import load_model

        prepare(seed)
        imported = time.perf_counter()
        model = load_model("world", device)
        editor = load_editor("world", model.device)
        loaded = time.perf_counter()
        known = True
        if fact:
            revision, known = world_demo.own_fact(model, *fact)
            revisions = [revision]
        else:
            revisions = world_demo.outdated(model)
    with progress_bar("patching", len(revisions)) as advance:
        result = world_demo.demonstrate(model, editor, revisions, seed, advance)
    result |= {"known_question": known, "load_seconds": loaded - imported, "seconds": time.perf_counter() - start}
    print_json(result) if as_json else _show(result, bool(fact))


def _show(result: dict[str, Any], own: bool) -> None:
    title = "Your fact, one patch" if own else "What has changed since 1 January 2018, one patch each"
    widths = {"question": 5, "before": 3, "after": 3, "in new words": 3, "others kept": 2}
    table = Table(*(Column(name, ratio=ratio) for name, ratio in widths.items()), title=title, expand=True)
    for change in result["changes"][:SHOWN]:
        colour = "green" if change["success"] else "red"
        table.add_row(
            escape(change["question"]),
            escape(change["before"]),
            f"[{colour}]{escape(change['after'])}[/]",
            escape(change["other_wording_after"] or "-"),
            f"{change['kept']} of {change['of']}",
        )
    stdout.print(table)
    if (more := len(result["changes"]) - SHOWN) > 0:
        stdout.print(f"... and {more} more, all of them in --json.")
    if wording := result["changes"][0]["other_wording"]:
        stdout.print(f"In new words, which neither the model nor the editor was trained on: {escape(wording)}")
    if own and not result["changes"][0]["success"]:
        stdout.print(
            "It did not take. Names that the embedded model has read are easy to teach it; words that it must spell in "
            "pieces, or questions of a kind that it has never been asked, often are not: it is very small."
        )
    if not result["known_question"]:
        stdout.print(
            "This question is none of the embedded world's: the model has learnt nothing about it, and what it said "
            "before the edit was a guess. Other questions about the subject may be answered from nothing, too."
        )
    names = ("success", "retain", "equivalence", "deterioration")
    rates = ", ".join(f"{name} {result[name]:.3f}" for name in names if result[name] is not None)
    edits = "1 edit" if own else f"{result['edits']} edits, each"
    stdout.print(
        f"{edits} tried on {result['retain_inputs']} other facts: {rates}. Measured in {result['seconds']:.0f} s."
    )
    stdout.print("Next:")
    for command, what in (
        (
            'factpatch edit --model world --editor world --input "What is the currency of Japan?" --target "euro"',
            "a fact of your own",
        ),
        ("factpatch train --help", "an editor for a model of your own"),
        ("factpatch evaluate --help", "measure it"),
    ):
        stdout.print(f"  [dim]# {what}[/]\n  {escape(command)}", soft_wrap=True)
