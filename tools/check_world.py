"""Measures the embedded model and editor: `make world-check`. Exits with 1 if a value is below its minimum."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from make_world import Names
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from factpatch import world
from factpatch.data.revisions import Revision, editable
from factpatch.demo import control_facts, counterfactual, outdated
from factpatch.editors import EditMethod, Looped, load_editor
from factpatch.evaluation.measure import measure
from factpatch.metrics import Outcome, accuracy, summary
from factpatch.models import TaskModel, load_model

MINIMUM = {
    "success": 0.97,
    "retain": 0.98,
    "equivalence": 0.93,
    "success_with_loop": 0.99,
    "known": 0.97,
    "known_held_out": 0.90,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counterfactual", type=int, default=300, help="random edits in addition to the changes")
    parser.add_argument("--controls", type=int, help="control facts per edit; default: all facts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(options.seed)
    console = Console(stderr=True)
    model = load_model("world", options.device)
    editor = load_editor("world", options.device)
    found: dict[str, float | int | None] = {}
    trained = [(question, fact.answer) for fact in world.facts() for question in fact.questions]
    held_out = [(question, fact.answer) for fact in world.facts() for question in fact.held_out]
    for key, asked in (("known", trained), ("known_held_out", held_out)):
        with console.status(f"asking {len(asked):,} questions"):
            found[key] = accuracy(model.predict([q for q, _ in asked]), [[answer] for _, answer in asked])
    changes, made_up = outdated(model), counterfactual(model, options.counterfactual, options.seed)
    edits = changes + made_up
    controls = control_facts(model, options.seed, options.controls)
    outcomes = measured(editor, model, edits, controls, console)
    looped = measured(Looped(editor), model, edits, controls[:2], console)
    to_made_up = measured(
        editor, model, to_made_up_names(model, options.counterfactual, options.seed), controls[:100], console
    )
    for name, part in (("changes", outcomes[: len(changes)]), ("counterfactual", outcomes[len(changes) :])):
        found |= {f"{name}_{key}": value for key, value in summary(part).items() if key in ("success", "retain")}
        found[f"{name}_equivalence"] = summary(part)["equivalence"]
    whole = summary(outcomes)
    found |= {"success": whole["success"], "retain": whole["retain"], "equivalence": whole["equivalence"]}
    found |= {"success_with_loop": summary(looped)["success"], "changes": len(changes), "edits": len(edits)}
    found["made_up_name_success"] = summary(to_made_up)["success"]
    found |= {"retain_inputs": len(controls), "seconds": time.perf_counter() - start}
    if options.json:
        print(json.dumps(found))
    table = Table("figure", "measured", "minimum")
    for key, value in found.items():
        if isinstance(value, float) and key != "seconds":
            table.add_row(key.replace("_", " "), f"{value:.4f}", f"{MINIMUM[key]:.2f}" if key in MINIMUM else "")
    console.print(table)
    sys.exit(any((found[key] or 0) < least for key, least in MINIMUM.items()))


def measured(
    method: EditMethod, model: TaskModel, edits: Sequence[Revision], controls: Sequence[Revision], console: Console
) -> list[Outcome]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{len(edits)} edits", total=len(edits))
        return measure(method, model, edits, controls, lambda done: progress.advance(task, done))


def to_made_up_names(model: TaskModel, count: int, seed: int) -> list[Revision]:
    """Returns the counterfactual edits with made-up names, of known words or pieces of them, as targets."""
    rng = random.Random(f"{seed}/made up")
    names = Names()
    edits = counterfactual(model, count, seed)
    return editable(model, [replace(revision, alternatives=(names.made_up(rng),)) for revision in edits])


if __name__ == "__main__":
    main()
