"""The command `factpatch demo`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from factpatch.cli import common
from factpatch.cli.common import MAX_UPDATES, Device, Json, Seed, at_least, escape

SHOWN = 30  # rows of the table; the JSON result has all
# The narrow columns of the table and their widths
NARROW = {"ok": 3, "other\nwording": 7, "same\ntopic": 5, "others\nkept": 6}
# Rates that are shown, by their keys in the JSON result
RATES = {"success": "success", "retain": "retain", "retain_neighbours": "same topic", "equivalence": "equivalence"}


def demo(
    fact: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="QUESTION ANSWER", help="Teach the model this fact instead of all changes since 2018."),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Ask and correct the model on a web page. Needs the extra `web`.")
    ] = False,
    max_updates: Annotated[
        int | None,
        at_least(
            1, "Repeat the update until the new answer is likely, at most N times. Default: 5 with --fact, otherwise 1."
        ),
    ] = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Correct the facts in the embedded model that have changed since 2018, one at a time and then all together.

    Measures how many edits succeed and how many other answers change. Takes about 15 seconds on two cores.

    Example: factpatch demo --fact "What is the capital of Australia?" Sydney
    """
    if page:
        if fact:
            raise typer.BadParameter("choose either --page or --fact")
        _open_page(device, seed, as_json)
        return
    start = time.perf_counter()
    max_updates = max_updates or (MAX_UPDATES if fact else 1)
    with common.working("loading"):
        from factpatch import demo as world_demo
        from factpatch.editors import SURE, Looped, load_editor

        common.prepare(seed)
        imported = time.perf_counter()
        model = common.load("world", device, seed)
        trained = load_editor("world", model.device)
        editor = Looped(trained, max_updates, SURE)
        loaded = time.perf_counter()
        revision, known = world_demo.own_fact(model, *fact) if fact else (None, True)
        revisions = [revision] if revision else world_demo.outdated(model)
    with common.progress_bar("patching", len(revisions)) as advance:
        result = world_demo.demonstrate(model, editor, revisions, seed, advance)
    if not fact:
        with common.working("all facts together"):
            result["together"] = world_demo.demonstrate_together(model, trained, revisions, seed)
    result |= {"known_question": known, "load_seconds": loaded - imported, "seconds": time.perf_counter() - start}
    if as_json:
        common.print_json(result)
        return
    _show_table(result, bool(fact))
    _show_failures(result, max_updates)
    _show_together(result)
    _show_summary(result)


def _open_page(device: str | None, seed: int, as_json: bool) -> None:
    """Serves the embedded model until it is interrupted. Accepted facts are forgotten afterwards."""
    from factpatch.cli.serve import serve

    with TemporaryDirectory() as folder:
        ledger = Path(folder) / "facts.db"
        serve("world", "world", ledger, port=0, open_browser=True, device=device, seed=seed, as_json=as_json)


def _show_table(result: dict[str, Any], is_own_fact: bool) -> None:
    """Prints one line per edit; what does not fit into the terminal's width is shortened, not wrapped."""
    title = "Your fact" if is_own_fact else "What has changed since 1 January 2018, one patch per fact"
    room = common.stdout.width - sum(NARROW.values()) - len(NARROW) - 3  # one space between columns
    answer = room * 2 // 9
    widths = {"question": room - 3 * answer, "before": answer, "wanted": answer, "now": answer, **NARROW}
    columns = [Column(name, width=width, no_wrap=True, overflow="ellipsis") for name, width in widths.items()]
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left")
    for change in result["changes"][:SHOWN]:
        table.add_row(
            escape(_shortened(change["question"], widths["question"])),
            *(escape(change[key]) for key in ("before", "target", "after")),
            "[green]yes[/]" if change["success"] else "[red]NO[/]",
            {None: "-", True: "yes", False: "NO"}[change["other_wording_success"]],
            f"{change['neighbours_kept']}/{change['neighbours']}" if change["neighbours"] else "-",
            f"{change['kept']}/{change['of']}",
        )
    common.stdout.print(table)
    if (more := len(result["changes"]) - SHOWN) > 0:
        common.stdout.print(f"... and {more} more; --json prints all.")
    if wording := result["changes"][0]["other_wording"]:
        common.stdout.print(f"Other wording: a phrasing that was never used in training, such as: {escape(wording)}")
    common.stdout.print("Same topic: answers kept to other questions about the same country, element or office.")


def _shortened(question: str, width: int) -> str:
    """Drops the first words of a long question, which many questions share, and cuts its end if necessary."""
    if len(question) > width:
        question = re.sub(r"^(What|Who|Which|How many) (\w+ )?(the )?", "…", question)
    return question if len(question) <= width else f"{question[: width - 1]}…"


def _show_failures(result: dict[str, Any], max_updates: int) -> None:
    if failed := [change for change in result["changes"] if not change["success"]]:
        common.stdout.print(f"{len(failed)} of {result['edits']} edits failed:")
        for change in failed:
            common.stdout.print(escape(f"- {change['question']} Wanted “{change['target']}”, got “{change['after']}”."))
        common.stdout.print(common.failed_edit_advice(max_updates))
    if not result["known_question"]:
        common.stdout.print(
            "The embedded model was not trained on this question in these words, so its answer before the edit may "
            "have been a guess. After the edit, it may answer other questions about the same subject wrongly."
        )


def _show_together(result: dict[str, Any]) -> None:
    if (joint := result.get("together")) is None:
        return
    title = f"All {joint['facts']} changes in the model at the same time, tried on {joint['retain_inputs']} other facts"
    ways = {
        "scoped": "a ledger of patches, each used only for questions about its own fact",
        "merged": f"one merged patch of {joint['bytes'] / 1e6:.1f} MB",
    }
    table = Table("approach", *RATES.values(), title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
    for key, label in ways.items():
        table.add_row(label, *(f"{joint[key][name]:.3f}" for name in RATES))
    common.stdout.print(table)
    common.stdout.print(
        f"One more fact took {joint['add_seconds']:.2f} s to add and {joint['remove_seconds']:.2f} s to remove."
    )


def _show_summary(result: dict[str, Any]) -> None:
    names = {**RATES, "deterioration": "deterioration"}
    rates = ", ".join(f"{label} {result[name]:.3f}" for name, label in names.items() if result[name] is not None)
    edits = "1 edit" if result["edits"] == 1 else f"{result['edits']} edits, each"
    common.stdout.print(
        f"{edits} tried on {result['retain_inputs']} other facts: {rates}. Measured in {result['seconds']:.0f} s."
    )
    common.stdout.print("Next:")
    for command, purpose in (
        ('demo --fact "What is the capital of Australia?" Sydney', "teach it a fact of your own"),
        ('ask --model world "What is the capital of Kenya?"', "ask it anything about the world of 2018"),
        ("demo --page", "ask and correct it in the browser (needs the extra web)"),
        ("train --help", "train an editor for a model of your own"),
        ("evaluate --help", "measure an editor"),
    ):
        common.stdout.print(f"  [dim]# {purpose}[/]\n  {escape(common.program())} {escape(command)}", soft_wrap=True)
