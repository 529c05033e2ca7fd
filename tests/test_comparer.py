"""The comparer of a scope: tells facts apart that differ in one word, and recognises paraphrases."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from factpatch.data.revisions import Revision
from factpatch.editors.finetune import GradientStep
from factpatch.errors import FileError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.scope import Scope, ScopeConfig, learning, predict_scoped
from factpatch.scope.comparer import Comparer
from factpatch.scope.features import spread_layers
from factpatch.scope.matching import LOWEST_THRESHOLD, Matcher
from factpatch.scope.reading import Reading
from factpatch.scope.reduction import Reduction

PLACES = "burundi gitega france paris africa europe rundi swahili".split()
CONFIG = ScopeConfig(dimensions=8, steps=120, seeds_per_step=16)


def revision(first: str, second: str) -> Revision:
    """A fact about two places: the other facts about one of them differ from it in a single word."""
    wordings = (f"in {second} people speak of {first}", f"where do people in {second} speak and what is {first} called")
    return Revision(f"{first} {second}", f"{first} is the largest city in {second}", "paris", (), wordings, (), ())


REVISIONS = [revision(first, second) for first, second in permutations(PLACES, 2)]


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture(scope="module")
def scope(model: TaskModel) -> Scope:
    return Scope.train(model, REVISIONS, CONFIG)


def with_comparer(model: TaskModel, steps: int) -> Scope:
    """A scope that keeps its comparer, even if so few steps make it worse than the cosine."""
    texts = [[r.input, *r.rephrases] for r in REVISIONS]
    layers = spread_layers(model)
    learned = learning.learn(model, texts, layers, replace(CONFIG, steps=steps), lambda stage, share: None)
    return Scope(model, layers, learned.mean, learned.scale, learned.projection, learned.matcher)


def comparer_of(scope: Scope) -> Comparer:
    assert scope.matcher.comparer is not None
    return scope.matcher.comparer


def test_it_recognises_more_paraphrases_than_the_cosine(model: TaskModel, scope: Scope) -> None:
    by_cosine = Scope.train(model, REVISIONS, replace(CONFIG, compare=False))
    assert by_cosine.matcher.comparer is None
    recalls = [one.calibrate(REVISIONS, false_matches=0.02).recall or 0.0 for one in (by_cosine, scope)]
    assert recalls[1] > recalls[0] + 0.2


def test_training_drops_a_comparer_that_recognises_fewer_paraphrases(
    model: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, false_matches=0.2)
    by_cosine = Scope.train(model, REVISIONS, replace(config, compare=False)).calibrated
    assert by_cosine.recall
    assert comparer_of(Scope.train(model, REVISIONS, config))  # a good one is kept

    def useless(reading: Reading, *_: object) -> Comparer:
        comparer = Comparer(reading.tokens.shape[1])
        for weight in comparer.decide.parameters():
            nn.init.zeros_(weight)  # all pairs get the same score
        return comparer.eval().requires_grad_(False)

    monkeypatch.setattr(learning, "learn_comparer", useless)
    dropped = Scope.train(model, REVISIONS, config)
    assert dropped.matcher == Matcher()
    assert dropped.calibration == by_cosine
    assert dropped.read(["paris"]).tokens.shape[1] == 0


def test_calibration_keeps_the_stated_share_of_false_matches(model: TaskModel) -> None:
    scope = with_comparer(model, steps=5)  # so few steps that it makes mistakes
    strict, loose = (scope.calibrate(REVISIONS, false_matches=share) for share in (0.0, 0.1))
    assert strict.false_matches == 0
    assert 0 < loose.false_matches <= 0.1
    assert strict.threshold > loose.threshold
    others = [r.input for r in REVISIONS[1::2]]
    scope.index([r.input for r in REVISIONS[::2]])
    measured = scope.calibrate_index(others, false_matches=0.2).false_matches
    assert sum(found is not None for found in scope.match(others)) == round(measured * len(others)) > 0


def test_scores_depend_neither_on_the_order_nor_on_the_batch(scope: Scope) -> None:
    reading = scope.read(["paris is a city", "in africa people speak swahili and rundi", "gitega"])
    left, right = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0, 0])
    scores = comparer_of(scope).scores(reading, left, reading, right)
    torch.testing.assert_close(comparer_of(scope).scores(reading, right, reading, left), scores)
    for pair in range(4):
        alone = comparer_of(scope).scores(reading, left[[pair]], reading, right[[pair]])
        torch.testing.assert_close(alone, scores[[pair]])
    assert len(set(scores.tolist())) == 4


def test_a_reading_keeps_each_text_apart_from_its_batch(scope: Scope) -> None:
    texts = ["paris", "in africa people speak swahili and rundi", "what is a lake"]
    together = scope.read(texts)
    for number, text in enumerate(texts):
        alone = scope.read([text])
        torch.testing.assert_close(together.vectors[[number]], alone.vectors)
        tokens, mask = together.part([2, number]).padded(torch.tensor([1]))
        assert mask.all()
        torch.testing.assert_close(tokens[0], alone.tokens.float(), atol=2e-3, rtol=1e-2)


def test_a_comparer_of_reduced_states_can_read_the_states_themselves() -> None:
    torch.manual_seed(0)
    states = torch.randn(400, 12) @ torch.randn(12, 40) * 3 + 5  # 12 directions vary
    reduction = Reduction.fit(states, seed=0)
    assert reduction.basis.shape == (40, 40)
    assert reduction(states).square().mean().item() == pytest.approx(1, rel=0.1)
    comparer = Comparer(40, width=4)
    expected = comparer.tokens(reduction(states))
    torch.testing.assert_close(reduction.folded_into(comparer).tokens(states), expected, atol=1e-3, rtol=1e-3)


def test_training_twice_gives_the_same_scope(model: TaskModel) -> None:
    one, other = (with_comparer(model, steps=5) for _ in range(2))
    assert one.calibrate(REVISIONS) == other.calibrate(REVISIONS)
    for mine, its in zip(comparer_of(one).saved().values(), comparer_of(other).saved().values(), strict=True):
        assert torch.equal(mine, its)


def test_texts_that_are_clearly_different_never_match(scope: Scope) -> None:
    scope.index([REVISIONS[0].input])
    loose = scope.calibrate_index([r.input for r in REVISIONS], false_matches=0.99)
    assert loose.threshold == LOWEST_THRESHOLD
    assert None in scope.match([r.input for r in REVISIONS])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian"])
def test_scoped_prediction_uses_the_comparer(name: str) -> None:
    model = tiny.build(name)
    scope = with_comparer(model, steps=10)
    edits = [FactEdit(r.input, tiny.other_answer(model, r.input)) for r in REVISIONS[:4]]
    patches = GradientStep(lr=0.5).propose(model, edits)
    scope.index(edits)
    scope.calibrate_index([r.input for r in REVISIONS[4:]], false_matches=0.2)
    inputs = [text for r in REVISIONS[:8] for text in (r.input, *r.rephrases)]
    matches, expected = scope.match(inputs), model.predict(inputs)
    for i, fact in enumerate(matches):
        if fact is not None:
            with patches[fact].applied(model):
                expected[i] = model.predict([inputs[i]])[0]
    assert len({*matches[1::3], *matches[2::3]}) > 1  # some paraphrases are matched, or match none, by their score
    assert predict_scoped(model, scope, patches, inputs) == expected


def test_a_scope_with_a_comparer_has_its_own_format(model: TaskModel, scope: Scope, tmp_path: Path) -> None:
    scope.save(tmp_path / "new")
    Scope.train(model, REVISIONS, replace(CONFIG, compare=False, steps=5)).save(tmp_path / "old")
    forms = []
    for name in ("old", "new"):
        with safe_open(tmp_path / name, "pt") as file:
            forms.append(file.metadata()["format"])
    assert forms == ["factpatch-scope-1", "factpatch-scope-2"]
    assert Scope.load(tmp_path / "old", model).matcher.comparer is None
    loaded, inputs = Scope.load(tmp_path / "new", model), [text for r in REVISIONS for text in r.rephrases]
    for one in (scope, loaded):
        one.calibrate(REVISIONS, false_matches=0.02)
    active = [r.input for r in REVISIONS]
    assert loaded.index(active).match(inputs) == scope.index(active).match(inputs)


def test_a_damaged_comparer_is_refused(model: TaskModel, scope: Scope, tmp_path: Path) -> None:
    scope.save(tmp_path / "scope")
    with safe_open(tmp_path / "scope", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weight = tensors["comparer.compare.0.weight"]
    for name, wrong in (
        ("comparer.compare.0.weight", weight[:-1].clone()),
        ("comparer.compare.0.weight", torch.full_like(weight, torch.nan)),
        ("comparer.project.bias", torch.zeros(0)),
        ("comparer.project.bias", torch.zeros(())),
        ("comparer.unknown", torch.zeros(1)),
    ):
        save_file({**tensors, name: wrong}, tmp_path / "scope", metadata)
        with pytest.raises(FileError, match="not a complete scope"):
            Scope.load(tmp_path / "scope", model)
    without = {name: tensor for name, tensor in tensors.items() if name != "comparer.sharpness"}
    for kept, floor in ((without, metadata["floor"]), (tensors, "null"), (tensors, "NaN")):
        save_file(kept, tmp_path / "scope", {**metadata, "floor": floor})
        with pytest.raises(FileError, match="not a complete scope"):
            Scope.load(tmp_path / "scope", model)
