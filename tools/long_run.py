"""Edits, merges, applies, reverts and asks in random order on the embedded world, with checks after every action.

python tools/long_run.py --minutes 60

After every action, the model's weights must be bit for bit the originals plus the applied patches. Memory is measured
once a minute. Exits with 1 if a check fails or memory grows by more than a tenth after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.utils import logging

from factpatch import Ledger, Patch, load_editor, load_model, merge, world
from factpatch.covariance import Covariance
from factpatch.data.revisions import edit_of
from factpatch.demo import counterfactual, question_of
from factpatch.editors import Looped
from factpatch.errors import InputError
from factpatch.facts import same

POOL = 40  # patches kept for later actions
MOST_APPLIED = 12
MOST_IN_LEDGER = 30
GROWTH = 1.1  # allowed ratio of memory at the end to memory after the first tenth


class LongRun:
    """The model under test, the patches made for it, and what its weights and answers were at the start."""

    def __init__(self, seed: int, folder: Path):
        self.rng = random.Random(seed)
        self.folder = folder
        self.model = load_model("world", "cpu")
        self.editor = load_editor("world", "cpu")
        self.originals = {name: weight.clone() for name, weight in self.model.model.state_dict().items()}
        self.questions = [question_of(fact) for fact in self.rng.sample(world.facts(), 600)]
        self.answers = dict(zip(self.questions, self.model.predict(self.questions), strict=True))
        self.covariance = Covariance.compute(self.model, self.questions)
        self.edits = [edit_of(revision) for revision in counterfactual(self.model, 400, seed)]
        self.ledger = Ledger(folder / "facts.db", self.model, covariance=self.covariance)
        self.pool = Looped(self.editor).propose(self.model, self.edits[:4])
        self.applied: list[Patch] = []
        self.counts: Counter[str] = Counter()

    # Actions

    def edit(self) -> None:
        """Proposes patches; each must work alone, or count as failed."""
        edits = self.rng.sample(self.edits, self.rng.randint(1, 8))
        patches = self.unedited(lambda: Looped(self.editor).propose(self.model, edits))
        answers = self.unedited(lambda: self.model.predict_patched(patches, [edit.x for edit in edits]))
        for patch, edit, answer in zip(patches, edits, answers, strict=True):
            self.counts["edits"] += 1
            if same(answer, edit.a):
                self.pool.append(patch)
            else:
                self.counts["edits that failed"] += 1
        del self.pool[:-POOL]

    def apply(self) -> None:
        if len(self.applied) < MOST_APPLIED:
            self.applied.append(self.rng.choice(self.pool))
            self.applied[-1].apply(self.model)

    def revert(self) -> None:
        if self.applied:
            patch = self.rng.choice(self.applied)
            patch.revert(self.model)
            last = max(i for i, one in enumerate(self.applied) if one == patch)
            del self.applied[last]

    def merge(self) -> None:
        """Merges patches with different inputs, in two orders that must give the same patch."""
        chosen = list(
            {patch.edits[0].x: patch for patch in self.rng.sample(self.pool, min(8, len(self.pool)))}.values()
        )
        merged = merge(self.model, chosen, covariance=self.covariance)
        self.rng.shuffle(chosen)
        expect(merge(self.model, chosen, covariance=self.covariance) == merged, "a merge depends on the order")
        with_it = self.unedited(lambda: self.model.predict_patched([merged] * len(merged.edits), asked(merged)))
        held = sum(same(answer, edit.a) for answer, edit in zip(with_it, merged.edits, strict=True))
        self.counts["merged facts"] += len(chosen)
        self.counts["merged facts that hold"] += held

    def ask(self) -> None:
        """Asks the unedited model, whose answers must not change, and the patched one, twice."""
        texts = self.rng.sample(self.questions, 20)
        before = self.unedited(lambda: self.model.predict(texts))
        expect(before == [self.answers[text] for text in texts], "an answer of the unedited model has changed")
        expect(self.model.predict(texts) == self.model.predict(texts), "the same question got two answers")
        self.counts["questions"] += 3 * len(texts)

    def keep(self) -> None:
        """Saves a patch and loads it again."""
        patch = self.rng.choice(self.pool)
        patch.save(self.folder / "patch.safetensors")
        expect(Patch.load(self.folder / "patch.safetensors") == patch, "a saved patch differs")

    def record(self) -> None:
        """Adds a fact to the ledger, or removes one."""
        facts = self.ledger.facts()
        if len(facts) >= MOST_IN_LEDGER or (facts and self.rng.random() < 0.4):
            self.ledger.remove(self.rng.choice(facts).id)
            return
        try:
            self.ledger.add(self.editor, [self.rng.choice(self.edits)])
        except InputError:
            self.counts["edits that failed"] += 1

    def forget(self) -> None:
        """Adds facts to the ledger and removes them: its patch must be as if they had never been there."""
        known = {fact.x for fact in self.ledger.facts()}
        new = [edit for edit in self.edits if edit.x not in known]
        before = self.ledger.patch()
        try:
            added = self.ledger.add(self.editor, self.rng.sample(new, 2))
        except InputError:
            self.counts["edits that failed"] += 2
            return
        self.ledger.patch()
        for fact in added:
            self.ledger.remove(fact.id)
        expect(self.ledger.patch() == before, "the ledger's patch still contains removed facts")

    def verify(self) -> None:
        found = self.ledger.verify(self.questions[:40])
        self.counts["ledger facts"] += len(found.verdicts)
        self.counts["ledger facts that hold"] += sum(verdict.holds for verdict in found.verdicts)

    def unedited(self, use: Callable[[], Any]) -> Any:
        """Runs `use` without the applied patches, which are reverted and then applied again."""
        for patch in reversed(self.applied):
            patch.revert(self.model)
        self.check_weights([])
        found = use()
        for patch in self.applied:
            patch.apply(self.model)
        return found

    # Checks

    def check_weights(self, applied: list[Patch]) -> None:
        expected = dict(self.originals)
        for patch in applied:
            for name, delta in patch.deltas.items():
                change = delta.dense()
                linear = isinstance(self.model.layers[name], nn.Linear)
                expected[name] = expected[name] + (change if linear else change.mT)
        found: dict[str, Tensor] = self.model.model.state_dict()
        wrong = [name for name, weight in expected.items() if not torch.equal(found[name], weight)]
        expect(not wrong, f"{len(wrong)} weights differ, such as {wrong[:1]}")

    def step(self) -> None:
        actions = self.edit, self.apply, self.revert, self.merge, self.ask, self.keep, self.record, self.forget
        often = (2, 6, 5, 1, 4, 2, 4, 1)
        rare = (self.verify,)
        (action,) = self.rng.choices((*actions, *rare), (*often, 0.3))
        action()
        self.counts[f"action {action.__name__}"] += 1
        self.check_weights(self.applied)
        self.counts["weight checks"] += 1


def asked(patch: Patch) -> list[str]:
    return [edit.x for edit in patch.edits]


def expect(holds: bool, problem: str) -> None:
    if not holds:
        raise SystemExit(f"failed: {problem}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    with TemporaryDirectory() as folder:
        run = LongRun(options.seed, Path(folder))
        memory = watch(run, 60 * options.minutes)
        run.ledger.close()
    settled = max(memory[: max(1, len(memory) // 10)])
    report = {**run.counts, "MB": [round(value) for value in memory], "growth": round(memory[-1] / settled, 3)}
    print(json.dumps(report, indent=1))
    sys.exit(memory[-1] > GROWTH * settled)


def watch(run: LongRun, seconds: float) -> list[float]:
    """Takes random actions for this many seconds. Returns the memory in use, in MB, measured once a minute."""
    start = time.monotonic()
    memory: list[float] = []
    while (passed := time.monotonic() - start) < seconds:
        run.step()
        if passed >= len(memory) * min(60, seconds / 10):
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 1e6)
            print(f"{passed:5.0f} s  {memory[-1]:6.0f} MB  {run.counts['weight checks']:,} checks", file=sys.stderr)
    return memory


if __name__ == "__main__":
    main()
