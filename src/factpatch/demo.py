"""The demonstration: the embedded model's outdated facts, each patched and measured on its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from factpatch import world
from factpatch.data.revisions import Revision
from factpatch.editors import EditMethod
from factpatch.evaluation.measure import examine_all
from factpatch.facts import FactEdit, normalize, same
from factpatch.metrics import Outcome, summary
from factpatch.models import TaskModel

CONTROLS = 40  # facts that should stay as they are, to try each patch on
QUESTION = re.compile(r"(who|whose|what|which|when|where|why|how|is|are|was|were|do|does|did|can|could)\b", re.I)


def demonstrate(
    model: TaskModel,
    editor: EditMethod,
    revisions: Sequence[Revision],
    seed: int = 0,
    on_done: Callable[[int], object] = lambda edits: None,
) -> dict[str, Any]:
    """Makes one patch per revision and asks the edited question, its other wordings and a sample of other facts."""
    controls = control_facts(model, seed)
    changes: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    for revision, examined in examine_all(editor, model, revisions, controls, on_done):
        wording = next(iter(revision.rephrases), None)
        outcomes.append(examined.outcome)
        kept = [
            same(answer, control.prediction)
            for answer, control in zip(examined.says_others, controls, strict=True)
            if not same(control.input, revision.input)
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
                "other_wording_success": same(examined.says[wording], revision.alternatives[0]) if wording else None,
                "kept": sum(kept),
                "of": len(kept),
            }
        )
    return {**summary(outcomes), "edits": len(changes), "retain_inputs": len(controls), "changes": changes}


def outdated(model: TaskModel) -> list[Revision]:
    """All changes since 2018 that the model does not know, with wordings it was not trained on as paraphrases."""
    return _to_change(model, [(change.fact, change.answer) for change in world.changes()])


def counterfactual(model: TaskModel, count: int, seed: int) -> list[Revision]:
    """Random facts, each to be changed to the answer of another fact of the same relation."""
    rng = random.Random(seed)
    answers: dict[str, list[str]] = {}
    for fact in world.facts():
        answers.setdefault(fact.relation, []).append(fact.answer)
    sample = rng.sample(world.facts(), min(2 * count, len(world.facts())))
    return _to_change(model, [(fact, rng.choice(answers[fact.relation])) for fact in sample])[:count]


def own_fact(model: TaskModel, question: str, answer: str) -> tuple[Revision, bool]:
    """A user's fact, and whether its question belongs to the embedded world.

    The question is spelled as the model was trained on it: exactly so if it is a known one, otherwise with a capital
    letter and a question mark. In another spelling the model reads other tokens, and answers at random.
    """
    known = {normalize(text): (text, fact) for fact in world.facts() for text in (*fact.questions, *fact.held_out)}
    question = question.strip()
    if QUESTION.match(question) and not question.endswith("?"):
        question = f"{question.rstrip('.! ')}?"
    spelled, fact = known.get(normalize(question), (question[:1].upper() + question[1:], None))
    (edit,) = model.resolve([FactEdit(spelled, answer)])
    wordings = tuple(text for text in fact.held_out if text != spelled) if fact else ()
    return Revision("own", edit.x, edit.y or "", (edit.a,), wordings, (), ()), fact is not None


def control_facts(model: TaskModel, seed: int, count: int | None = CONTROLS) -> list[Revision]:
    """A sample of the facts, or all, each with the model's answer."""
    facts = world.facts()
    sample = facts if count is None else random.Random(seed).sample(facts, min(count, len(facts)))
    answers = model.predict([question_of(fact) for fact in sample])
    return [
        Revision(fact.id, question_of(fact), answer, (), (), (), (fact.answer,))
        for fact, answer in zip(sample, answers, strict=True)
    ]


def question_of(fact: world.Fact) -> str:
    """The one wording in which a fact is asked here, so that an edit can be told from its control inputs."""
    return fact.questions[0] if fact.id in world.changed() else random.Random(fact.id).choice(fact.questions)


def _to_change(model: TaskModel, wanted: Sequence[tuple[world.Fact, str]]) -> list[Revision]:
    """The changes that the model's answers do not have yet, with held-out wordings as paraphrases."""
    answers = model.predict([question_of(fact) for fact, _ in wanted])
    return [
        Revision(fact.id, question_of(fact), answer, (target,), tuple(fact.held_out), (), (fact.answer,))
        for (fact, target), answer in zip(wanted, answers, strict=True)
        if not same(answer, target)
    ]
