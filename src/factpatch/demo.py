"""The demonstration: the embedded model's outdated facts, patched one by one and then all at the same time."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from factpatch import world
from factpatch.covariance import Covariance
from factpatch.data.revisions import Neighbour, Revision, edit_of
from factpatch.editors import EditMethod, TrainableEditor
from factpatch.evaluation.measure import examine_all
from factpatch.evaluation.merges import examine_answers
from factpatch.facts import FactEdit, normalize, same
from factpatch.ledger import Ledger
from factpatch.metrics import Outcome, summary
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.scope import Scope

CONTROLS = 15  # control facts that each patch is tried on
NEIGHBOURS = 6  # maximum number of other facts about the same topic that each patch is tried on
CONTROLS_TOGETHER = 120  # control facts that all patches together are tried on
OTHERS = 600  # facts that the ledger's merge is fitted to


def demonstrate(
    model: TaskModel,
    editor: EditMethod,
    revisions: Sequence[Revision],
    seed: int = 0,
    on_done: Callable[[int], object] = lambda edits: None,
) -> dict[str, Any]:
    """Makes one patch per revision, and asks the edited question, other wordings of it and other facts.

    The other facts are up to six about the same topic, and a sample of all facts.
    """
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
        neighbours = [same(examined.says[one.input], one.prediction) for one in revision.neighbours]
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
                "neighbours_kept": sum(neighbours),
                "neighbours": len(neighbours),
                "kept": sum(kept),
                "of": len(kept),
            }
        )
    return {**summary(outcomes), "edits": len(changes), "retain_inputs": len(controls), "changes": changes}


def demonstrate_together(
    model: TaskModel, editor: TrainableEditor, revisions: Sequence[Revision], seed: int = 0
) -> dict[str, Any]:
    """Measures all revisions at the same time: through a ledger and its scope, and in the world's merged patch.

    Also times how long it takes to add one more fact to the ledger, and to remove it, until its merged patch is ready.
    """
    controls = control_facts(model, seed + 1, CONTROLS_TOGETHER, world.spare())
    known = {question_of(fact): fact.answer for fact in random.Random(seed).sample(world.facts(), OTHERS)}
    covariance = Covariance.compute(model, known, known)
    spare = {question_of(fact) for fact in world.spare()}  # other facts may be changed, or the merge is fitted to them
    revisions = [
        replace(r, rephrases=r.rephrases[:1], neighbours=tuple(one for one in r.neighbours if one.input in spare))
        for r in revisions
    ]
    edits = [edit_of(revision) for revision in revisions]
    with TemporaryDirectory() as folder, Ledger(Path(folder) / "facts.db", model, covariance=covariance) as ledger:
        ledger.add(editor, edits[:-1])
        ledger.patch()
        start = time.perf_counter()
        (last,) = ledger.add(editor, edits[-1:])
        ledger.patch()
        added = time.perf_counter()
        ledger.remove(last.id)
        ledger.patch()
        removed = time.perf_counter()
        ledger.add(editor, edits[-1:])
        ledger.scope = Scope.load(world.SCOPE, model)
        scoped = _rates(lambda texts: model.predict_scoped(ledger, texts), revisions, controls)
    patch = Patch.load(world.MERGED)
    with patch.applied(model):
        merged = _rates(model.predict, revisions, controls)
    times = {"add_seconds": added - start, "remove_seconds": removed - added}
    sizes = {"facts": len(revisions), "retain_inputs": len(controls), "bytes": patch.nbytes}
    return {**sizes, **times, "merged": merged, "scoped": scoped}


def _rates(
    answer: Callable[[list[str]], list[str]], revisions: Sequence[Revision], controls: Sequence[Revision]
) -> dict[str, float | None]:
    rates = summary([one.outcome for one in examine_answers(answer, revisions, controls)])
    return {key: rates[key] for key in ("success", "retain", "equivalence", "retain_neighbours")}


def outdated(model: TaskModel) -> list[Revision]:
    """Returns all changes since 2018 that the model does not know, with held-out wordings as paraphrases."""
    return _to_change(model, [(change.fact, change.answer) for change in world.changes()])


def counterfactual(model: TaskModel, count: int, seed: int) -> list[Revision]:
    """Returns edits of random facts, each to the answer of another fact of the same relation."""
    rng = random.Random(seed)
    answers: dict[str, list[str]] = {}
    for fact in world.facts():
        answers.setdefault(fact.relation, []).append(fact.answer)
    sample = rng.sample(world.facts(), min(2 * count, len(world.facts())))
    return _to_change(model, [(fact, rng.choice(answers[fact.relation])) for fact in sample])[:count]


def own_fact(model: TaskModel, question: str, answer: str) -> tuple[Revision, bool]:
    """Returns a user's fact as a revision, and whether its question is one of the embedded world's wordings."""
    known = {normalize(text): fact for fact in world.facts() for text in (*fact.questions, *fact.held_out)}
    fact = known.get(normalize(question))
    (edit,) = model.resolve([FactEdit(question.strip(), answer)])
    wordings = tuple(text for text in fact.held_out if not same(text, question)) if fact else ()
    topic = fact.topic if fact else topic_of(question)
    own = Revision(fact.id if fact else "own", edit.x, edit.y or "", (edit.a,), wordings, (), (), subject=topic)
    (revision,) = with_neighbours(model, [own])
    if not fact:  # one of them may be the fact itself, asked in words that the world knows
        others = tuple(one for one in revision.neighbours if not same(one.prediction, revision.prediction))
        revision = replace(revision, neighbours=others)
    return revision, fact is not None


def topic_of(question: str) -> str | None:
    """Returns the longest name of a topic that a question mentions."""
    words = _words(question)
    return max((topic for topic in world.facts_by_topic() if _words(topic) in words), key=len, default=None)


def control_facts(
    model: TaskModel, seed: int, count: int | None = CONTROLS, facts: Sequence[world.Fact] = ()
) -> list[Revision]:
    """Returns `count` random facts (None means all), each with the model's answer. Default: 15 of all facts."""
    facts = facts or world.facts()
    sample = facts if count is None else random.Random(seed).sample(facts, min(count, len(facts)))
    answers = model.predict([question_of(fact) for fact in sample])
    return [
        Revision(fact.id, question_of(fact), answer, (), (), (), (fact.answer,))
        for fact, answer in zip(sample, answers, strict=True)
    ]


def question_of(fact: world.Fact) -> str:
    """Returns the only wording used here for a fact, so that control inputs can be distinguished from an edit."""
    return fact.questions[0] if fact.id in world.changed() else random.Random(fact.id).choice(fact.questions)


def with_neighbours(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """Adds questions about other facts with the same topic, with the model's answers, to each revision."""
    asked: list[list[str]] = []
    for revision in revisions:
        facts = [fact for fact in world.facts_by_topic().get(revision.subject or "", ()) if fact.id != revision.id]
        sample = random.Random(revision.id).sample(facts, min(NEIGHBOURS, len(facts)))
        asked.append([question_of(fact) for fact in sample])
    questions = list(dict.fromkeys(question for own in asked for question in own))
    answers = dict(zip(questions, model.predict(questions), strict=True))
    return [
        replace(revision, neighbours=tuple(Neighbour(question, answers[question]) for question in own))
        for revision, own in zip(revisions, asked, strict=True)
    ]


def _to_change(model: TaskModel, wanted: Sequence[tuple[world.Fact, str]]) -> list[Revision]:
    """Returns revisions for answers that the model does not give yet, with held-out wordings as paraphrases."""
    answers = model.predict([question_of(fact) for fact, _ in wanted])
    revisions = [
        Revision(
            fact.id, question_of(fact), answer, (target,), tuple(fact.held_out), (), (fact.answer,), subject=fact.topic
        )
        for (fact, target), answer in zip(wanted, answers, strict=True)
        if not same(answer, target)
    ]
    return with_neighbours(model, revisions)


def _words(text: str) -> str:
    """Returns the words of a text in lower case, with a space before and after each."""
    return " ".join(["", *re.findall(r"\w+", text.lower()), ""])
