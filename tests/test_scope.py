"""Scope: each input finds its own fact or none, and is answered under that fact's patch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from factpatch.data.revisions import Revision
from factpatch.editors.finetune import GradientStep
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.scope import Scope, ScopeConfig, predict_scoped

CITIES = "burundi france paris africa europe gitega bujumbura rundi swahili euro franc lake".split()
CONFIG = ScopeConfig(compare=False, dimensions=16, steps=60, learning_rate=1e-2)


def revision(subject: str) -> Revision:
    wordings = (f"where is the city called {subject}", f"what country is {subject} in")
    return Revision(subject, f"what is the capital of {subject} ?", "paris", (), wordings, (), ())


REVISIONS = [revision(subject) for subject in CITIES]


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return tiny.build("bart")


@pytest.fixture(scope="module")
def scope(model: TaskModel) -> Scope:
    return Scope.train(model, REVISIONS, CONFIG)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_matches_a_fact_by_its_own_input(name: str) -> None:
    model = tiny.build(name)
    scope = Scope.plain(model, REVISIONS, false_matches=0.0)
    scope.index([r.input for r in REVISIONS])
    assert scope.match([r.input for r in REVISIONS]) == list(range(len(REVISIONS)))
    assert scope.match(["What is the capital of  France"]) == [CITIES.index("france")]  # equal after normalising


def test_training_finds_paraphrases_and_leaves_other_inputs_alone(scope: Scope) -> None:
    active, others = REVISIONS[:6], REVISIONS[6:]
    scope.calibrate(REVISIONS, false_matches=0.0)
    scope.index([FactEdit(r.input, "paris") for r in active])
    matches = scope.match([text for r in active for text in r.rephrases])
    owners = [n for n, r in enumerate(active) for _ in r.rephrases]
    assert sum(found == owner for found, owner in zip(matches, owners, strict=True)) >= len(owners) * 0.8
    assert scope.match([r.input for r in others]) == [None] * len(others)


def test_known_paraphrases_are_anchors(scope: Scope) -> None:
    texts = ["who leads france", "where do people speak swahili"]
    scope.index([["what is the capital of france ?", texts[0]], ["what is the capital of africa ?", texts[1]]])
    assert scope.match(texts) == [0, 1]


def test_empty_index_matches_nothing(model: TaskModel, scope: Scope) -> None:
    scope.index([])
    inputs = [r.input for r in REVISIONS]
    assert scope.match(inputs) == [None] * len(inputs)
    assert predict_scoped(model, scope, [], inputs) == model.predict(inputs)


def test_two_facts_with_one_input_are_refused(scope: Scope) -> None:
    with pytest.raises(InputError, match="same input"):
        scope.index(["What is the capital of France?", "what is the capital of france ?"])


def test_calibration_keeps_the_stated_share_of_false_matches(scope: Scope) -> None:
    strict, loose = (scope.calibrate(REVISIONS, false_matches=share) for share in (0.0, 0.5))
    assert strict.false_matches == 0
    assert 0 < loose.false_matches <= 0.5
    assert strict.threshold > loose.threshold
    assert strict.recall is not None
    assert loose.recall is not None
    assert strict.recall <= loose.recall


def test_calibration_on_the_active_facts(scope: Scope) -> None:
    others = [r.input for r in REVISIONS[6:]]
    scope.index([r.input for r in REVISIONS[:6]])
    assert scope.calibrate_index(others, false_matches=0.0).false_matches == 0
    assert scope.match(others) == [None] * len(others)
    loose = scope.calibrate_index([*others, REVISIONS[0].input], false_matches=0.5)  # a fact's own input does not count
    assert sum(found is not None for found in scope.match(others)) == loose.false_matches * len(others) == 3
    with pytest.raises(InputError, match="index facts first"):
        scope.index([]).calibrate_index(others)


def test_calibration_without_paraphrases_has_no_recall(scope: Scope) -> None:
    bare = [replace(r, rephrases=()) for r in REVISIONS]
    assert scope.calibrate(bare).recall is None


@pytest.mark.parametrize("trained", [True, False])
def test_saved_and_loaded_scopes_are_equal(model: TaskModel, scope: Scope, trained: bool, tmp_path: Path) -> None:
    saved = scope if trained else Scope.plain(model, REVISIONS)
    saved.save(tmp_path / "scope.safetensors")
    loaded = Scope.load(tmp_path / "scope.safetensors", model)
    texts = [r.input for r in REVISIONS]
    assert torch.equal(loaded.read(texts).vectors, saved.read(texts).vectors)
    assert torch.equal(loaded.read(texts).tokens, saved.read(texts).tokens)
    assert loaded.matcher.floor == saved.matcher.floor
    assert (loaded.layers, loaded.calibration) == (saved.layers, saved.calibration)


def test_files_that_do_not_fit_are_refused(model: TaskModel, scope: Scope, tmp_path: Path) -> None:
    path = tmp_path / "scope.safetensors"
    scope.save(path)
    with pytest.raises(MismatchError, match="was made for weights"):
        Scope.load(path, tiny.build("bart", seed=1))
    with pytest.raises(FileError, match="no scope file"):
        Scope.load(tmp_path / "none.safetensors", model)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileError, match="not a readable scope"):
        Scope.load(path, model)
    (patch,) = GradientStep(lr=1.0).propose(model, [FactEdit("who leads france", "paris")])
    patch.save(path)
    with pytest.raises(FileError, match="expected format"):
        Scope.load(path, model)


def test_training_needs_some_facts(model: TaskModel) -> None:
    with pytest.raises(InputError, match="at least 10 facts"):
        Scope.train(model, REVISIONS[:3], CONFIG)
    with pytest.raises(InputError, match="two different facts"):
        Scope.plain(model, [REVISIONS[0], REVISIONS[0]])


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "t5", "marian"])
def test_scoped_prediction_equals_applying_each_patch_by_hand(name: str) -> None:
    model = tiny.build(name)
    scope = Scope.plain(model, REVISIONS, false_matches=0.0)
    edits = [FactEdit(r.input, tiny.other_answer(model, r.input)) for r in REVISIONS[:4]]
    patches = GradientStep(lr=0.5).propose(model, edits)
    scope.index(edits)
    inputs = [r.input for r in REVISIONS] + ["who leads africa and europe"]
    expected = model.predict(inputs)
    for i, fact in enumerate(scope.match(inputs)):
        if fact is not None:
            with patches[fact].applied(model):
                expected[i] = model.predict([inputs[i]])[0]
    before = model.predict(inputs)
    assert predict_scoped(model, scope, patches, inputs) == expected
    assert expected != before  # or the patches would show nothing


def test_scoped_prediction_refuses_what_does_not_belong_together(model: TaskModel, scope: Scope) -> None:
    edits = [FactEdit(REVISIONS[0].input, tiny.other_answer(model, REVISIONS[0].input))]
    (patch,) = GradientStep(lr=0.5).propose(model, edits)
    scope.index(edits)
    with pytest.raises(InputError, match="one patch per indexed fact"):
        predict_scoped(model, scope, [], ["who leads france"])
    with pytest.raises(MismatchError, match="another model"):
        predict_scoped(tiny.build("bart", seed=1), scope, [patch], ["who leads france"])
    with patch.applied(model), pytest.raises(InputError, match="unedited model"):
        predict_scoped(model, scope, [patch], ["who leads france"])
    with patch.applied(model), pytest.raises(InputError, match="unedited model"):
        scope.match(["who leads france"])


def test_indexing_the_same_facts_again_costs_nothing(
    model: TaskModel, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope.index([[r.input, *r.rephrases] for r in REVISIONS])
    monkeypatch.setattr(scope, "read", lambda texts: pytest.fail("texts are read again"))
    scope.index([[r.input, *r.rephrases] for r in REVISIONS])
    monkeypatch.undo()
    scope.index([REVISIONS[0].input])
    assert scope.match([REVISIONS[0].input, REVISIONS[1].input])[0] == 0
    with pytest.raises(InputError, match="the same input"):
        scope.index([REVISIONS[1].input, REVISIONS[1].input])
    scope.index([REVISIONS[0].input])  # indexed in full after the failure
    assert scope.facts == 1


def test_the_command_writes_a_scope_that_loads(run, model: TaskModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(f"{r.to_json()}\n" for r in REVISIONS))
    arguments = ["--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--device", "cpu", "--steps", 5]
    result = run("scope", "train", *arguments, "--output", tmp_path / "scope.safetensors", "--json").json
    loaded = Scope.load(tmp_path / "scope.safetensors", model)
    assert loaded.calibrated.threshold == result["threshold"]
    assert set(result) == {"threshold", "recall", "false_matches", "facts", "comparer", "seconds"}
    assert result["comparer"] == (loaded.matcher.comparer is not None)


def test_a_damaged_file_is_refused(model: TaskModel, scope: Scope, tmp_path: Path) -> None:
    scope.save(tmp_path / "scope")
    with safe_open(tmp_path / "scope", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in ("mean", "scale")}
    for wrong in (torch.zeros(0, 1), torch.zeros(()), torch.zeros(3), torch.full_like(tensors["mean"], torch.nan)):
        save_file({**tensors, "mean": wrong}, tmp_path / "scope", metadata)
        with pytest.raises(FileError, match="not a complete scope"):
            Scope.load(tmp_path / "scope", model)
    for key, text in (
        ("layers", "[99]"),
        ("layers", "[" * 3000),
        ("calibration", "1"),
        ("calibration", "[null,1,1,1]"),
    ):
        save_file(tensors, tmp_path / "scope", {**metadata, key: text})
        with pytest.raises(FileError, match="not a complete scope"):
            Scope.load(tmp_path / "scope", model)
