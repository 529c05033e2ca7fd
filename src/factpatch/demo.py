"""The demonstration: the embedded model's outdated facts, each patched and measured on its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from factpatch import world
from factpatch.editors import HyperNetwork
from factpatch.evaluation.measure import Examiner, edit_of
from factpatch.facts import FactEdit, Revision, normalize, same
from factpatch.metrics import Outcome, summary
from factpatch.models import TaskModel

OTHERS = 100  # other facts that each patch is tried on


def demonstrate(
    model: TaskModel,
    editor: HyperNetwork,
    revisions: Sequence[Revision],
    seed: int = 0,
    on_done: Callable[[int], object] = lambda edits: None,
) -> dict[str, Any]:
    """One patch, of one update, for each revision; what it does to the question, to other wordings, to other facts."""
    others = other_facts(model, seed)
    examiner = Examiner(model, others, editor.at_once(model))
    changes: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    size = editor.at_once(model)
    for start in range(0, len(revisions), size):
        batch = revisions[start : start + size]
        patches = editor.propose(model, [edit_of(revision) for revision in batch])
        wordings = [revision.human_rephrases[0] if revision.human_rephrases else "" for revision in batch]
        in_other_words = model.predict_patched(
            patches, [text or r.input for text, r in zip(wordings, batch, strict=True)]
        )
        for revision, examined, wording, said in zip(
            batch, examiner.examine(patches, batch), wordings, in_other_words, strict=True
        ):
            outcomes.append(examined.outcome)
            kept = [same(text, other.prediction) for text, other in zip(examined.says_others, others, strict=True)]
            changes.append(
                {
                    "question": revision.input,
                    "before": revision.prediction,
                    "target": revision.alternatives[0],
                    "after": examined.says,
                    "success": examined.outcome.success,
                    "other_wording": wording or None,
                    "other_wording_after": said if wording else None,
                    "kept": sum(kept),
                    "of": len(kept),
                }
            )
        on_done(len(batch))
    return {**summary(outcomes), "edits": len(changes), "retain_inputs": len(others), "changes": changes}


def outdated(model: TaskModel) -> list[Revision]:
    """Every change since 2018 that the model does not know of, with wordings it has never seen."""
    changes = world.changes()
    said = model.predict([change.fact.questions[0] for change in changes])
    return [
        _revision(change.fact, change.fact.questions[0], prediction, change.answer)
        for change, prediction in zip(changes, said, strict=True)
        if not same(prediction, change.answer)
    ]


def counterfactual(model: TaskModel, count: int, seed: int) -> list[Revision]:
    """Random facts, each to be changed to the answer of another of its kind."""
    chance = random.Random(seed)
    answers: dict[str, list[str]] = {}
    for fact in world.facts():
        answers.setdefault(fact.relation, []).append(fact.answer)
    found: list[Revision] = []
    sample = chance.sample(world.facts(), len(world.facts()))
    questions = [chance.choice(fact.questions) for fact in sample[: 2 * count]]
    for fact, question, said in zip(sample, questions, model.predict(questions), strict=False):
        others = sorted({answer for answer in answers[fact.relation] if not same(answer, said)})
        if others and len(found) < count:
            found.append(_revision(fact, question, said, chance.choice(others)))
    return found


def own_fact(model: TaskModel, question: str, answer: str) -> tuple[Revision, bool]:
    """A user's fact, and whether the model has been taught anything about its question."""
    (edit,) = model.resolve([FactEdit(question, answer)])
    known = {normalize(text): fact for fact in world.facts() for text in (*fact.questions, *fact.held_out)}
    fact = known.get(normalize(question))
    wordings = tuple(fact.held_out) if fact else ()
    return Revision("own", edit.x, edit.y or "", (edit.a,), (), wordings, ()), fact is not None


def other_facts(model: TaskModel, seed: int, count: int | None = OTHERS) -> list[Revision]:
    """Facts that have not changed, each in one wording, with what the model says to it."""
    chance = random.Random(seed)
    changed = {change.fact.id for change in world.changes()}
    unchanged = [fact for fact in world.facts() if fact.id not in changed]
    sample = unchanged if count is None else chance.sample(unchanged, min(count, len(unchanged)))
    questions = [chance.choice(fact.questions) for fact in sample]
    said = model.predict(questions)
    return [
        Revision(fact.id, question, prediction, (), (), (), (fact.answer,))
        for fact, question, prediction in zip(sample, questions, said, strict=True)
    ]


def _revision(fact: world.Fact, question: str, prediction: str, target: str) -> Revision:
    """Held-out wordings stand in for human paraphrases."""
    return Revision(fact.id, question, prediction, (target,), (), tuple(fact.held_out), (fact.answer,))
