"""Measures the embedded world: `make world-check`. Ends with 1 where a figure is below what is promised."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from factpatch import world
from factpatch.demo import counterfactual, other_facts, outdated
from factpatch.editors import Looped, load_editor
from factpatch.evaluation.measure import Examiner, edit_of
from factpatch.metrics import Outcome, accuracy, mean, summary
from factpatch.models import load_model

WANTED = {
    "success": 0.97,
    "retain": 0.98,
    "equivalence": 0.93,
    "success_with_loop": 0.99,
    "known": 0.97,
    "known_held_out": 0.90,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counterfactual", type=int, default=300, help="random edits besides the changes")
    parser.add_argument("--others", type=int, help="other facts to try each edit on; all, if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(options.seed)
    console = Console(stderr=True)
    model = load_model("world", "cpu")
    editor = load_editor("world", "cpu")
    found: dict[str, float | int | None] = {}
    trained = [(question, fact.answer) for fact in world.facts() for question in fact.questions]
    held_out = [(question, fact.answer) for fact in world.facts() for question in fact.held_out]
    for key, asked in (("known", trained), ("known_held_out", held_out)):
        with console.status(f"asking {len(asked):,} questions"):
            found[key] = accuracy(model.predict([q for q, _ in asked]), [[answer] for _, answer in asked])
    changes, made_up = outdated(model), counterfactual(model, options.counterfactual, options.seed)
    edits = changes + made_up
    others = other_facts(model, options.seed, options.others)
    size = editor.at_once(model)
    examiner = Examiner(model, others, size)
    outcomes: list[Outcome] = []
    looped: list[bool] = []
    for first in track(range(0, len(edits), size), "editing", console=console):
        batch = edits[first : first + size]
        outcomes += [one.outcome for one in examiner.examine(editor.propose(model, [edit_of(r) for r in batch]), batch)]
        patches = Looped(editor).propose(model, [edit_of(r) for r in batch])
        said = model.predict_patched(patches, [r.input for r in batch])
        looped += [patch.edits[0].a.casefold() == text.casefold() for patch, text in zip(patches, said, strict=True)]
    for name, part in (("changes", outcomes[: len(changes)]), ("counterfactual", outcomes[len(changes) :])):
        found |= {f"{name}_{key}": value for key, value in summary(part).items() if key in ("success", "retain")}
        found[f"{name}_equivalence"] = summary(part)["equivalence_human"]
    whole = summary(outcomes)
    found |= {"success": whole["success"], "retain": whole["retain"], "equivalence": whole["equivalence_human"]}
    found |= {"success_with_loop": mean(map(float, looped)), "changes": len(changes), "edits": len(edits)}
    found |= {"retain_inputs": len(others), "seconds": time.perf_counter() - start}
    if options.json:
        print(json.dumps(found))
    table = Table("figure", "measured", "at least")
    for key, value in found.items():
        if isinstance(value, float) and key != "seconds":
            table.add_row(key.replace("_", " "), f"{value:.4f}", f"{WANTED[key]:.2f}" if key in WANTED else "")
    console.print(table)
    sys.exit(any((found[key] or 0) < least for key, least in WANTED.items()))


if __name__ == "__main__":
    main()
