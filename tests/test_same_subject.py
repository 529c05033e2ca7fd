"""Made-up questions about the subjects of facts: a scope trained on them tells apart what is asked about a subject."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tiny
import torch

from factpatch.data.holdout import hash_shuffled
from factpatch.data.revisions import Revision
from factpatch.errors import InputError
from factpatch.models import TaskModel
from factpatch.scope import Scope, ScopeConfig
from factpatch.scope import scope as scope_module
from factpatch.scope.matching import threshold_for
from factpatch.scope.same_subject import made_up_questions

WORDINGS = {
    "capital": ("capital of {}", "{} capital", "the capital {}"),
    "leader": ("who leads {}", "{} who leads", "leads {} who"),
    "currency": ("currency in {}", "{} currency", "a currency {}"),
}
PLACES = "burundi gitega france paris africa europe rundi swahili euro franc lake river".split()
CONFIG = ScopeConfig(compare=False, dimensions=16, steps=300, seeds_per_step=16, learning_rate=1e-2, false_matches=0.0)


def revision(subject: str, relation: str) -> Revision:
    question, *paraphrases = (wording.format(subject) for wording in WORDINGS[relation])
    about = {"subject": subject, "relation": relation}
    return Revision(f"{relation}/{subject}", question, "paris", (), tuple(paraphrases), (), (), **about)


RNG = random.Random(0)
SUBJECTS = list(dict.fromkeys(" ".join(RNG.sample(PLACES, 4)) for _ in range(300)))
REVISIONS = [revision(subject, list(WORDINGS)[number % 3]) for number, subject in enumerate(SUBJECTS)]
TEXTS = [[r.input, *r.rephrases] for r in REVISIONS]


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return tiny.build("bert")


def test_made_up_questions_ask_something_else_about_the_same_subjects() -> None:
    made_up = made_up_questions(REVISIONS, TEXTS, len(REVISIONS), seed=0)
    assert len(REVISIONS) / 3 < len(made_up) < len(REVISIONS)  # a third of the drawn relations are the fact's own
    expected = {
        (r.subject, relation): [wording.format(r.subject) for wording in WORDINGS[relation]]
        for r in REVISIONS
        for relation in WORDINGS
        if relation != r.relation
    }
    assert all(wordings in expected.values() for wordings in made_up)
    assert len({wordings[0] for wordings in made_up}) == len(made_up)
    assert len(made_up_questions(REVISIONS, TEXTS, 9, seed=0)) <= 9


def test_the_seed_decides_which_questions_are_made_up() -> None:
    one, same, other = (made_up_questions(REVISIONS, TEXTS, 20, seed) for seed in (0, 0, 1))
    assert one == same != other


def test_no_question_is_made_up_twice_about_subjects_with_several_facts() -> None:
    twice, texts = [*REVISIONS[:30], *REVISIONS[:30]], [*TEXTS[:30], *TEXTS[:30]]
    made_up = made_up_questions(twice, texts, 60, seed=0)
    assert 0 < len({wordings[0] for wordings in made_up}) == len(made_up)


def test_a_question_that_a_fact_already_asks_is_not_made_up() -> None:
    known = [revision(subject, relation) for subject in PLACES for relation in WORDINGS]
    assert made_up_questions(known, [[r.input, *r.rephrases] for r in known], len(known), seed=0) == []


def test_facts_without_subject_or_relation_give_no_questions() -> None:
    for missing in ({"subject": None}, {"relation": None}, {"subject": "city"}):  # no question contains "city"
        assert made_up_questions([replace(r, **missing) for r in REVISIONS], TEXTS, 50, seed=0) == []
    assert made_up_questions(REVISIONS, [texts[:1] for texts in TEXTS], 50, seed=0) == []  # no second wording
    assert made_up_questions([], [], 50, seed=0) == []


def test_only_whole_words_are_replaced() -> None:
    facts = [replace(REVISIONS[0], subject="It", relation="a"), replace(REVISIONS[0], subject="C++ (2)", relation="b")]
    texts = [["Who wrote It in Italy?", "Italy: It was written by whom?"], ["Is C++ (2) new?", "New: C++ (2)?"]]
    made_up = {wordings[0]: wordings for seed in range(9) for wordings in made_up_questions(facts, texts, 2, seed)}
    assert sorted(made_up.values()) == [
        ["Is It new?", "New: It?"],
        ["Who wrote C++ (2) in Italy?", "Italy: C++ (2) was written by whom?"],
    ]


def test_a_scope_learns_to_tell_questions_about_one_subject_apart(model: TaskModel) -> None:
    trained, active, others = REVISIONS[:150], REVISIONS[150:225], REVISIONS[225:]
    paraphrases = [text for r in active for text in r.rephrases]
    same_subject = [WORDINGS[other][0].format(r.subject) for r in active for other in WORDINGS if other != r.relation]
    recalls, wrong = [], []
    for share in (0.0, 1.0):
        scope = Scope.train(model, trained, replace(CONFIG, same_subject=share)).index([r.input for r in active])
        scope.calibrate_index([r.input for r in others], false_matches=0.2)
        for texts, matched in ((paraphrases, recalls), (same_subject, wrong)):
            matched.append(sum(fact is not None for fact in scope.match(texts)) / len(texts))
    assert wrong[1] < wrong[0] - 0.15
    assert recalls[1] > recalls[0] - 0.05


def test_the_threshold_is_chosen_on_made_up_questions_too(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope_module, "SAME_SUBJECT_INPUTS", 0.5)
    held_out = hash_shuffled(REVISIONS, CONFIG.seed)[: len(REVISIONS) // 5]  # as Scope.train chooses them
    made_up = scope_module._same_subject_inputs(held_out, CONFIG)
    scope = Scope.train(model, REVISIONS, replace(CONFIG, false_matches=0.2))
    inputs = scope.read([*(r.input for r in held_out), *made_up])
    scores, _ = scope.matcher.best(inputs, inputs.part(slice(len(held_out))), besides_own=True)
    assert scope.calibrated.threshold == pytest.approx(threshold_for(scores, 0.2))
    assert scope.calibrated.threshold != pytest.approx(threshold_for(scores[: len(held_out)], 0.2))


def test_a_tenth_of_the_inputs_are_made_up() -> None:
    many = [replace(revision(f"paris {n}", "leader"), relation=str(n)) for n in range(900)]
    many.append(replace(many[0], subject=None))  # not counted among the subjects, but among the inputs
    assert len(scope_module._same_subject_inputs(many, CONFIG)) == 100
    assert scope_module._same_subject_inputs(many, replace(CONFIG, same_subject=0.0)) == []


def test_facts_without_subjects_are_trained_on_as_before(model: TaskModel) -> None:
    bare = [replace(r, subject=None, relation=None) for r in REVISIONS]
    scopes = [
        Scope.train(model, bare, replace(CONFIG, compare=True, steps=5, same_subject=share)) for share in (0.0, 0.5)
    ]
    one, other = (scope.read(["who leads paris"]) for scope in scopes)
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.tokens, other.tokens)
    assert scopes[0].calibration == scopes[1].calibration


def test_the_share_of_made_up_questions_is_checked() -> None:
    for share in (-0.1, 1.5):
        with pytest.raises(InputError, match="same_subject must be from 0 to 1"):
            ScopeConfig(same_subject=share)
