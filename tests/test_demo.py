"""The demonstration shows what the embedded model really answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Ran

from factpatch import demo, world
from factpatch.cli.common import program
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
    assert (result["edits"], result["retain_inputs"]) == (3, demo.CONTROLS)
    for revision, change in zip(revisions, result["changes"], strict=True):
        (patch,) = editor.propose(model, [edit_of(revision)])
        with patch.applied(model):
            assert model.predict([change["question"], change["other_wording"]]) == [
                change["after"],
                change["other_wording_after"],
            ]
            beside = model.predict([one.input for one in revision.neighbours])
        kept = [same(says, one.prediction) for says, one in zip(beside, revision.neighbours, strict=True)]
        assert (change["neighbours_kept"], change["neighbours"]) == (sum(kept), len(kept))
        assert change["success"] == same(change["after"], change["target"])
        assert 0 <= change["kept"] <= change["of"] == demo.CONTROLS
    assert result["success"] == sum(change["success"] for change in result["changes"]) / 3
    assert not model.patches


def test_outdated_facts_are_asked_in_trained_words_and_checked_in_new_ones(model: TaskModel) -> None:
    known = {fact.id: fact for fact in world.facts()}
    for revision in demo.outdated(model):
        fact = known[revision.id]
        assert revision.input == fact.questions[0] == demo.question_of(fact)
        assert list(revision.rephrases) == fact.held_out
        assert not same(revision.prediction, revision.alternatives[0])


def test_neighbours_are_other_facts_about_the_same_topic(model: TaskModel) -> None:
    facts = {demo.question_of(fact): fact for fact in world.facts()}
    for revision in demo.outdated(model):
        assert len(revision.neighbours) <= demo.NEIGHBOURS
        for neighbour in revision.neighbours:
            fact = facts[neighbour.input]
            assert fact.topic == revision.subject
            assert fact.id != revision.id


@pytest.mark.parametrize(
    ("fact", "topic"),
    [
        ("capital/the Netherlands", "Netherlands"),
        ("country_by_capital/Nairobi", "Kenya"),
        ("office_holder/President of Kenya", "Kenya"),
        ("office_holder/Pope", "Pope"),
        ("us_state_abbreviation/Ohio", "Ohio"),
    ],
)
def test_topics(fact: str, topic: str) -> None:
    (found,) = [known for known in world.facts() if known.id == fact]
    assert found.topic == topic


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


@pytest.mark.parametrize(
    "question", ["what is the capital of australia", "What is the CAPITAL of Australia ?", "capital of australia"]
)
def test_a_question_is_asked_as_it_was_typed(model: TaskModel, question: str) -> None:
    revision, known = demo.own_fact(model, f" {question}", "Sydney")
    assert revision.input == question
    assert revision.prediction == "Canberra"
    assert known == question.lower().startswith("what is")
    assert 0 < len(revision.neighbours) <= demo.NEIGHBOURS
    assert all("Australia" in one.input or one.prediction == "Australia" for one in revision.neighbours)
    assert not any(same(one.prediction, "Canberra") for one in revision.neighbours)


def test_a_held_out_wording_is_no_paraphrase_of_itself(model: TaskModel) -> None:
    fact = next(fact for fact in world.facts() if fact.id == "capital/Australia")
    revision, _ = demo.own_fact(model, fact.held_out[0].lower(), "Sydney")
    assert list(revision.rephrases) == fact.held_out[1:]


def change(question: str, success: bool) -> dict[str, Any]:
    about = {"question": question, "before": "Elizabeth II", "target": "Charles III"}
    after = "Charles III" if success else "Azabudai Hills Mori JP Tower"
    wording = {"other_wording": "Who?", "other_wording_after": after, "other_wording_success": success}
    kept = {"neighbours_kept": 5, "neighbours": 6, "kept": 40, "of": 40}
    return {**about, "after": after, "success": success, **wording, **kept}


def test_the_table_fits_80_columns_and_names_every_failure(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without colours: in a log, success and failure are words."""
    changes = [change(f"Who is the Prime Minister of country {i}, which is far away?", i % 20 > 0) for i in range(60)]
    rates = {"success": 0.95, "retain": 1.0, "equivalence": 0.95, "deterioration": 0.0, "retain_neighbours": 0.9}
    result = {**rates, "edits": 60, "retain_inputs": 40, "changes": changes}
    monkeypatch.setattr(demo, "demonstrate", lambda *_: result)
    outdated = demo.outdated
    monkeypatch.setattr(demo, "outdated", lambda model: outdated(model)[:3])  # the facts that are tried together
    monkeypatch.setattr(demo, "CONTROLS_TOGETHER", 30)
    monkeypatch.setattr(demo, "OTHERS", 200)
    monkeypatch.setattr("factpatch.cli.common.stdout.width", 80)
    out = run("demo", "--device", "cpu").out
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith("…Prime Minister")]
    assert len(rows) == 30
    assert all(len(line) <= 80 for line in lines if "factpatch" not in line)
    assert [" NO " in row for row in rows] == [i % 20 == 0 for i in range(30)]
    assert [" yes " in row for row in rows] == [i % 20 > 0 for i in range(30)]
    text = " ".join(out.split())
    assert "3 of 60 edits failed" in text
    for i in (0, 20, 40):
        assert f"country {i}, which is far away? Wanted “Charles III”, got “Azabudai Hills Mori JP Tower”." in text
    assert "--max-updates 5" in text


def test_next_commands_run_before_the_environment_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/factpatch", "demo"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert program() == ".venv/bin/factpatch"
    monkeypatch.setattr("sys.argv", ["/somewhere/factpatch/__main__.py", "demo"])
    assert program() == f"{sys.executable} -m factpatch"
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert program() == "factpatch"


def test_the_command(run: Callable[..., Ran]) -> None:
    ran = run("demo", "--fact", "Who painted the ceiling of my kitchen?", "Ann", "--device", "cpu")
    assert ran.code == 0
    said = " ".join(ran.out.split())
    assert "not trained on this question in these words" in said
    assert f"1 edit tried on {demo.CONTROLS} other facts" in said
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
    assert result["success"] == 1
    assert result["known_question"]
    assert result["equivalence"] is not None
    ran = run("demo", "--fact", "What is the capital of Kenya?", "", "--device", "cpu")
    assert ran.code == 1
    assert "empty" in ran.err


def test_all_facts_at_once(model: TaskModel, editor: TrainableEditor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CONTROLS_TOGETHER", 30)
    monkeypatch.setattr(demo, "OTHERS", 200)
    found = demo.demonstrate_together(model, editor, demo.outdated(model)[:6])
    assert (found["facts"], found["retain_inputs"]) == (6, 30)
    assert found["bytes"] > 0
    assert found["scoped"]["success"] == 1
    assert found["merged"]["success"] == 1
    assert found["merged"]["retain"] > 0.9
    assert found["merged"].keys() == found["scoped"].keys() > {"retain_neighbours"}
    assert found["add_seconds"] > 0
    assert not model.patches, "the model leaves as it came"
