"""Measures the embedded model and editor: `make world-check`. Exits with 1 if a value is below its minimum."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from world_names import Names, names_to_check
from world_typing import Typist, questions_to_check, trained_wording

from factpatch import world
from factpatch.data.revisions import Revision, editable
from factpatch.demo import control_facts, counterfactual, outdated, with_neighbours
from factpatch.editors import SURE, EditMethod, Looped, load_editor
from factpatch.evaluation.measure import measure
from factpatch.facts import same
from factpatch.metrics import Outcome, accuracy, summary
from factpatch.models import load_model

MINIMUM = {
    "success": 0.97,
    "retain": 0.98,
    "retain_same_topic": 0.95,
    "equivalence": 0.93,
    "success_with_loop": 0.99,
    "known": 0.97,
    "known_held_out": 0.90,
    "typed_known": 0.95,
    "typed_loop_success": 0.95,
    "names_loop_success": 0.95,
    "names_loop_retain": 0.99,
    "names_loop_retain_same_topic": 0.90,
    "names_loop_equivalence": 0.90,
}
RATES = {
    "success": "success",
    "retain": "retain",
    "retain_neighbours": "retain_same_topic",
    "equivalence": "equivalence",
}
PARTS = ("known", "typed", "names", "edits")
CONTROLS = 100  # control facts for edits of typed questions and for edits to made-up names
TYPED_PARAPHRASES = 2  # per edit
GENERATED = 200  # generated questions and names, with --tuning

Found = dict[str, float | int | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="world", help='a folder, or "world"')
    parser.add_argument("--editor", default="world", help='a folder, or "world"')
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; can be repeated")
    parser.add_argument("--counterfactual", type=int, default=300, help="random edits in addition to the changes")
    parser.add_argument("--controls", type=int, help="control facts per edit; default: all facts")
    parser.add_argument(
        "--tuning", action="store_true", help="use generated questions and names instead of those written for checks"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    console = Console(stderr=True)
    check = Check(options, console)
    start = time.perf_counter()
    found: Found = {}
    for part in options.part or PARTS:
        for key, value in getattr(check, part)():
            found[key] = value
            console.print(key, value)
    found["seconds"] = time.perf_counter() - start
    if options.json:
        print(json.dumps(found))
    table = Table("figure", "measured", "minimum")
    for key, value in found.items():
        if isinstance(value, float) and key != "seconds":
            table.add_row(key.replace("_", " "), f"{value:.4f}", f"{MINIMUM[key]:.2f}" if key in MINIMUM else "")
    console.print(table)
    sys.exit(any((found[key] or 0) < least for key, least in MINIMUM.items() if key in found))


class Check:
    """One model and its editor, and what they are measured with."""

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.console = options, console
        self.model = load_model(options.model, options.device)
        self.editor = load_editor(options.editor, options.device)
        self.rng = random.Random(f"{options.seed}/check")
        self.typist = Typist()
        self.controls = control_facts(self.model, options.seed + 1, CONTROLS)

    def known(self) -> Iterator[tuple[str, float | None]]:
        """Asks for all facts in trained and in held-out wordings, and in the typed questions."""
        facts, typist, rng = world.facts()[:: 8 if self.options.tuning else 1], self.typist, self.rng
        yield "known", self._accuracy([(text, fact.answer) for fact in facts for text in fact.questions])
        yield "known_held_out", self._accuracy([(text, fact.answer) for fact in facts for text in fact.held_out])
        for key, held_out in (("known_typed", False), ("known_typed_held_out", True)):
            asked = [(text, fact.answer) for fact in facts for text in typist.questions(fact, 1, rng, held_out)]
            yield key, self._accuracy(asked)

    def typed(self) -> Iterator[tuple[str, float | None]]:
        """Asks questions as people type them, and changes each answer to that of another fact of the same relation."""
        known = {fact.id: fact for fact in world.facts()}
        if self.options.tuning:
            sample = self.rng.sample(world.facts(), GENERATED)
            asked = [(fact, *self.typist.questions(fact, 1, self.rng, held_out=True)) for fact in sample]
        else:
            asked = [(known[f"{q['relation']}/{q['subject']}"], q["question"]) for q in questions_to_check()]
        yield "typed_known", self._accuracy([(text, fact.answer) for fact, text in asked])
        new = [(f, text) for f, text in asked if not trained_wording(text, f.subject, f.relation)]
        yield "typed_known_new_wording", self._accuracy([(text, fact.answer) for fact, text in new])
        others = Names().of
        targets = [self.rng.choice([a for a in others[f.relation] if not same(a, f.answer)]) for f, _ in asked]
        yield from self._measured("typed", asked, targets)

    def names(self) -> Iterator[tuple[str, float | None]]:
        """Measures edits whose targets are made-up names that the model has never read."""
        names = Names()
        targets = [names.made_up(self.rng) for _ in range(GENERATED)] if self.options.tuning else names_to_check()
        facts = self.rng.sample(world.facts(), len(targets))
        yield from self._measured("names", [(fact, self.rng.choice(fact.questions)) for fact in facts], targets)

    def edits(self) -> Iterator[tuple[str, float | int | None]]:
        """Makes all changes, and random edits, each measured against all facts."""
        model, options = self.model, self.options
        changes, made_up = outdated(model), counterfactual(model, options.counterfactual, options.seed)
        controls = control_facts(model, options.seed, options.controls)
        outcomes = self._outcomes(self.editor, changes + made_up, controls)
        looped = self._outcomes(Looped(self.editor, sure=SURE), changes + made_up, controls[:2])
        for name, part in (("changes", outcomes[: len(changes)]), ("counterfactual", outcomes[len(changes) :])):
            yield from ((f"{name}_{label}", summary(part)[key]) for key, label in RATES.items())
        yield from ((label, summary(outcomes)[key]) for key, label in RATES.items())
        yield "success_with_loop", summary(looped)["success"]
        yield "changes", len(changes)
        yield "edits", len(outcomes)
        yield "retain_inputs", len(controls)

    def _accuracy(self, asked: Sequence[tuple[str, str]]) -> float | None:
        with self.console.status(f"asking {len(asked):,} questions"):
            answers = self.model.predict([question for question, _ in asked])
        return accuracy(answers, [[answer] for _, answer in asked])

    def _measured(
        self, name: str, asked: Sequence[tuple[world.Fact, str]], targets: Sequence[str]
    ) -> Iterator[tuple[str, float | None]]:
        """Yields the figures of these edits, with one update and with repeated ones."""
        answers = self.model.predict([text for _, text in asked])
        revisions = [
            Revision(
                fact.id,
                text,
                answer,
                (target,),
                tuple(fact.held_out),
                self._typed(fact),
                (fact.answer,),
                subject=fact.topic,
            )
            for (fact, text), answer, target in zip(asked, answers, targets, strict=True)
        ]
        edits = with_neighbours(self.model, editable(self.model, revisions))
        yield f"{name}_edits", len(edits)
        for kind, method in (("", self.editor), ("loop_", Looped(self.editor, sure=SURE))):
            found = summary(self._outcomes(method, edits, self.controls))
            for key, label in (*RATES.items(), ("equivalence_human", "equivalence_typed")):
                yield f"{name}_{kind}{label}", found[key]

    def _typed(self, fact: world.Fact) -> tuple[str, ...]:
        return tuple(self.typist.questions(fact, TYPED_PARAPHRASES, self.rng, held_out=True))

    def _outcomes(self, method: EditMethod, edits: Sequence[Revision], controls: Sequence[Revision]) -> list[Outcome]:
        with Progress(console=self.console, transient=True) as progress:
            task = progress.add_task(f"{len(edits)} edits", total=len(edits))
            return measure(method, self.model, edits, controls, lambda done: progress.advance(task, done))


if __name__ == "__main__":
    main()
