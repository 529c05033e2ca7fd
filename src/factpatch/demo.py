"""The demonstration: the embedded model's outdated facts, each patched and measured on its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from factpatch import world
from factpatch.data.revisions import Revision
from factpatch.editors import EditMethod
from factpatch.evaluation.measure import examine_all
from factpatch.facts import FactEdit, normalize, same
from factpatch.metrics import Outcome, summary
from factpatch.models import TaskModel

OTHERS = 40  # other facts that each patch is tried on


def demonstrate(
    model: TaskModel,
    editor: EditMethod,
    revisions: Sequence[Revision],
    seed: int = 0,
    on_done: Callable[[int], object] = lambda edits: None,
) -> dict[str, Any]:
    """One patch, of one update, for each revision; what it does to the question, to other wordings, to other facts."""
    others = other_facts(model, seed)
    changes: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    for revision, examined in examine_all(editor, model, revisions, others, on_done):
        wording = next(iter(revision.rephrases), None)
        outcomes.append(examined.outcome)
        kept = [
            same(text, other.prediction)
            for text, other in zip(examined.says_others, others, strict=True)
            if not same(other.input, revision.input)
        ]
        changes.append(
            {
                "question": revision.input,
                "before": revision.prediction,
                "target": revision.alternatives[0],
                "after": examined.says[revision.input],
                "success": examined.outcome.success,
                "other_wording": wording,
                "other_wording_after": examined.says[wording] if wording else None,
                "kept": sum(kept),
                "of": len(kept),
            }
        )
    return {**summary(outcomes), "edits": len(changes), "retain_inputs": len(others), "changes": changes}


def outdated(model: TaskModel) -> list[Revision]:
    """Every change since 2018 that the model does not know of, with wordings it has never seen."""
    return _to_change(model, [(change.fact, change.answer) for change in world.changes()])


def counterfactual(model: TaskModel, count: int, seed: int) -> list[Revision]:
    """Random facts, each to be changed to the answer of another of its kind."""
    chance = random.Random(seed)
    answers: dict[str, list[str]] = {}
    for fact in world.facts():
        answers.setdefault(fact.relation, []).append(fact.answer)
    sample = chance.sample(world.facts(), min(2 * count, len(world.facts())))
    return _to_change(model, [(fact, chance.choice(answers[fact.relation])) for fact in sample])[:count]


def own_fact(model: TaskModel, question: str, answer: str) -> tuple[Revision, bool]:
    """A user's fact, and whether the model has been taught anything about its question."""
    (edit,) = model.resolve([FactEdit(question, answer)])
    known = {normalize(text): fact for fact in world.facts() for text in (*fact.questions, *fact.held_out)}
    fact = known.get(normalize(question))
    wordings = tuple(fact.held_out) if fact else ()
    return Revision("own", edit.x, edit.y or "", (edit.a,), wordings, (), ()), fact is not None


def other_facts(model: TaskModel, seed: int, count: int | None = OTHERS) -> list[Revision]:
    """Facts, all or a sample, with what the model says to each in the one wording that it is always asked in here."""
    facts = world.facts()
    sample = facts if count is None else random.Random(seed).sample(facts, min(count, len(facts)))
    said = model.predict([question_of(fact) for fact in sample])
    return [
        Revision(fact.id, question_of(fact), prediction, (), (), (), (fact.answer,))
        for fact, prediction in zip(sample, said, strict=True)
    ]


def question_of(fact: world.Fact) -> str:
    """The same for an edit of the fact and for the fact as another's bystander, so that no edit is its own."""
    return fact.questions[0] if fact.id in world.changed() else random.Random(fact.id).choice(fact.questions)


def _to_change(model: TaskModel, wanted: Sequence[tuple[world.Fact, str]]) -> list[Revision]:
    """Those that the model does not say already, each with its held-out wordings as paraphrases."""
    said = model.predict([question_of(fact) for fact, _ in wanted])
    return [
        Revision(fact.id, question_of(fact), prediction, (target,), tuple(fact.held_out), (), (fact.answer,))
        for (fact, target), prediction in zip(wanted, said, strict=True)
        if not same(prediction, target)
    ]
