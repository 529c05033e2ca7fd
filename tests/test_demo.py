"""The demonstration: what it shows is measured, on the model that ships."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Ran

from factpatch import demo, world
from factpatch.data.revisions import edit_of
from factpatch.editors import TrainableEditor, load_editor
from factpatch.errors import InputError
from factpatch.facts import same
from factpatch.models import TaskModel, load_model


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return load_model("world", "cpu")


@pytest.fixture(scope="module")
def editor() -> TrainableEditor:
    return load_editor("world")


def test_what_is_shown_is_what_the_patched_model_says(model: TaskModel, editor: TrainableEditor) -> None:
    revisions = demo.outdated(model)[:3]
    result = demo.demonstrate(model, editor, revisions, seed=3)
    assert (result["edits"], result["retain_inputs"]) == (3, demo.OTHERS)
    for revision, change in zip(revisions, result["changes"], strict=True):
        (patch,) = editor.propose(model, [edit_of(revision)])
        with patch.applied(model):
            assert model.predict([change["question"], change["other_wording"]]) == [
                change["after"],
                change["other_wording_after"],
            ]
        assert change["success"] == same(change["after"], change["target"])
        assert 0 <= change["kept"] <= change["of"] == demo.OTHERS
    assert result["success"] == sum(change["success"] for change in result["changes"]) / 3
    assert not model.patches


def test_outdated_facts_are_asked_in_trained_words_and_checked_in_new_ones(model: TaskModel) -> None:
    known = {fact.id: fact for fact in world.facts()}
    for revision in demo.outdated(model):
        fact = known[revision.id]
        assert revision.input == fact.questions[0] == demo.question_of(fact)
        assert list(revision.rephrases) == fact.held_out
        assert not same(revision.prediction, revision.alternatives[0])


def test_counterfactual_edits_ask_for_another_answer(model: TaskModel) -> None:
    made_up = demo.counterfactual(model, 20, seed=1)
    assert len({revision.id for revision in made_up}) == 20
    assert [r.input for r in demo.counterfactual(model, 20, seed=1)] == [r.input for r in made_up]
    for revision in made_up:
        assert not same(revision.prediction, revision.alternatives[0])


def test_a_fact_of_ones_own(model: TaskModel) -> None:
    revision, known = demo.own_fact(model, "What is the capital of Australia?", "Sydney")
    assert known
    assert revision.rephrases
    stranger, known = demo.own_fact(model, "Who painted the ceiling of my kitchen?", "Ann")
    assert not known
    assert stranger.prediction, "the model answers anyway"
    with pytest.raises(InputError, match="the model answers in at most"):
        demo.own_fact(model, "What is the capital of Australia?", "a very long answer indeed " * 9)
    with pytest.raises(InputError, match="already says"):
        demo.own_fact(model, "What is the capital of France?", "paris")


def test_the_command(run: Callable[..., Ran]) -> None:
    ran = run("demo", "--fact", "Who painted the ceiling of my kitchen?", "Ann", "--device", "cpu")
    assert ran.code == 0
    said = " ".join(ran.out.split())
    assert "none of the embedded world's" in said
    assert f"1 edit tried on {demo.OTHERS} other facts" in said
    result = run("demo", "--fact", "What is the capital of Kenya?", "Mombasa", "--device", "cpu", "--json").json
    assert result.keys() >= {
        "success",
        "retain",
        "equivalence",
        "equivalence_human",
        "deterioration",
        "edits",
        "seconds",
    }
    assert result["changes"][0]["before"] == "Nairobi"
    assert result["known_question"]
    assert result["equivalence"] is not None
    ran = run("demo", "--fact", "What is the capital of Kenya?", "", "--device", "cpu")
    assert ran.code == 1
    assert "empty" in ran.err
