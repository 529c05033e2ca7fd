"""The answers that edits ask for: in training, in validation and in evaluation."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from conftest import Ran, loud_editor
from samples import WORDS, answerer, read_lines, revisions, write_revisions
from training_runs import QUICK, start

from factpatch.data.revisions import Revision, edit_of, editable
from factpatch.data.targets import PER_REVISION, find_targets, invented_name, with_targets
from factpatch.errors import InputError
from factpatch.facts import normalize, same
from factpatch.models import TaskModel, load_model
from factpatch.training import TrainConfig, resolve_config
from factpatch.training.batcher import Batcher
from factpatch.training.sampler import Sampler


@pytest.fixture(scope="module")
def bart() -> TaskModel:
    return tiny.build("bart")


@pytest.fixture(scope="module")
def known(bart: TaskModel) -> list[Revision]:
    """Facts of two relations with different answers; the model is right about every fourth fact."""
    made = revisions(bart, 40)
    half = len(WORDS) // 2
    answers = {"capital": WORDS[:half], "leader": WORDS[half:]}
    found = []
    for i, revision in enumerate(made):
        relation = ("capital", "leader")[i % 2]
        answer = revision.prediction if i % 4 == 0 else answers[relation][i % half]
        found.append(replace(revision, relation=relation, answers=(answer,)))
    return found


def targets_of(model: TaskModel, known: list[Revision], kind: str, seed: int = 0) -> list[tuple[str, ...]]:
    return [own[0] for own in find_targets(model, known, [kind], seed)]


def test_alternatives(bart: TaskModel, known: list[Revision]) -> None:
    assert with_targets(bart, known, ["beam"]) == editable(bart, known)


def test_an_answer_that_the_data_names_is_the_only_target(bart: TaskModel, known: list[Revision]) -> None:
    named = [replace(revision, target=revision.alternatives[-1]) for revision in known]
    assert targets_of(bart, named, "beam") == [(revision.alternatives[-1],) for revision in known]


def test_gold_answers_of_wrong_predictions(bart: TaskModel, known: list[Revision]) -> None:
    for revision, targets in zip(known, targets_of(bart, known, "gold"), strict=True):
        right = same(revision.prediction, revision.answers[0])
        assert targets == (() if right else revision.answers)
    aimed = with_targets(bart, known, ["gold"])
    assert 0 < len(aimed) < len(known), "only where the model is wrong"
    assert all(edit_of(revision).a == revision.answers[0] for revision in aimed)


def test_answers_of_the_same_relation(bart: TaskModel, known: list[Revision]) -> None:
    answers = {name: {r.answers[0] for r in known if r.relation == name} for name in ("capital", "leader")}
    assert not answers["capital"] & answers["leader"]
    for revision, targets in zip(known, targets_of(bart, known, "relation"), strict=True):
        assert len(targets) == len(set(targets)) == PER_REVISION
        assert set(targets) <= answers[str(revision.relation)]
        produced = {normalize(t) for t in (revision.prediction, *revision.alternatives, *revision.answers)}
        assert produced.isdisjoint(map(normalize, targets))
    unknown = [replace(r, relation=None) for r in known]
    drawn = {target for targets in targets_of(bart, unknown, "relation") for target in targets}
    assert drawn & answers["capital"]
    assert drawn & answers["leader"]
    only = replace(known[1], relation="river")
    assert targets_of(bart, [*known, only], "relation")[-1] == (), "no other fact has this relation"


def test_targets_depend_on_the_seed_and_not_on_the_order(bart: TaskModel, known: list[Revision]) -> None:
    first = targets_of(bart, known, "relation")
    assert targets_of(bart, known, "relation") == first
    assert targets_of(bart, known, "relation", seed=1) != first


def test_invented_names() -> None:
    """The embedded model can spell any text."""
    world = load_model("world", "cpu")
    texts = ["Who is the president of Chad?", "What is the capital of Mali?"]
    known = [Revision(str(i), text, "Bamako", (), (), (), ("Rovena",)) for i, text in enumerate(texts)]
    for names in targets_of(world, known, "invented"):
        assert 0 < len(set(names)) == len(names) <= PER_REVISION
        assert all(1 <= len(name.split()) <= 6 for name in names)
    rng = random.Random(0)
    names = [invented_name(rng) for _ in range(3000)]
    lengths = Counter(len(name.split()) for name in names)
    assert set(lengths) == set(range(1, 7))
    assert min(lengths.values()) > 400
    assert len(set(names)) > 2900
    words = {word for name in targets_of(world, known, "invented")[0] for word in name.split()}
    taken = [replace(known[0], answers=tuple(words))]
    again = {word for name in targets_of(world, taken, "invented")[0] for word in name.split()}
    assert not words & again, "words of the data are not used"


def test_a_classifier_has_its_labels_only(checker: Path, claims: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a classifier can only be edited to its other labels"):
        start(replace(QUICK, targets=("beam", "gold")), checker, tmp_path / "run").run(claims)
    assert not (tmp_path / "run").exists()


def test_kinds_are_drawn_with_equal_chance(bart: TaskModel, known: list[Revision]) -> None:
    kinds = ("beam", "gold", "relation")
    targets = find_targets(bart, known, kinds)
    config = TrainConfig(edits=40, rows=4, targets=kinds)
    sampler = Sampler(known, config, targets)
    drawn: dict[int, list[int]] = {}
    for step in range(300):
        plan = sampler.plan(step)
        for revision, target in zip(plan.edited, plan.targets, strict=True):
            drawn.setdefault(int(revision), []).append(int(target))
    assert len(drawn) == len(known), "also those without alternatives"
    for revision, found in drawn.items():
        own = targets[revision]
        there = [kind for kind, texts in enumerate(own) if texts]
        kind_of = [kind for kind, texts in enumerate(own) for _ in texts]
        shares = np.bincount([kind_of[target] for target in found], minlength=3) / len(found)
        # 300 draws: the standard error of a share is at most 0.029.
        assert shares[there] == pytest.approx(np.full(len(there), 1 / len(there)), abs=0.13)
        assert set(found) == set(range(len(kind_of))), "every target is drawn"


def test_batches_hold_the_targets(bart: TaskModel, known: list[Revision]) -> None:
    kinds = ("gold", "relation")
    targets = find_targets(bart, known, kinds)
    config = TrainConfig(edits=6, rows=4, targets=kinds)
    plan = Sampler(known, config, targets).plan(0)
    batch = Batcher(bart, loud_editor(bart), known, config, targets).batch(plan, 6)
    wanted = [sum(targets[i], ())[k] for i, k in zip(plan.edited, plan.targets, strict=True)]
    labels = batch.edit_batch.rows.labels
    assert labels is not None
    for row, ids in zip(labels.tolist(), bart.encode_targets(wanted), strict=True):
        assert row[: len(ids)] == ids
    said = bart.tokenizer.batch_decode(batch.edit_batch.condition.ids, skip_special_tokens=True)
    expected = [f"{known[i].prediction} >> {a} || {known[i].input}" for i, a in zip(plan.edited, wanted, strict=True)]
    assert said == [bart.tokenizer.decode(bart.tokenizer(text)["input_ids"], True) for text in expected]


def test_training_and_validation_draw_all_kinds(tmp_path: Path) -> None:
    folder = answerer(tmp_path / "answerer")
    data = write_revisions(tmp_path / "data.jsonl", load_model(folder, "cpu"), 60)
    config = resolve_config(None, None, ['targets=["beam","gold","relation"]'], {})
    run = start(replace(QUICK, steps=2, targets=config.targets), folder, tmp_path / "run")
    run.run(data)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["config"]["targets"] == ["beam", "gold", "relation"]
    beams = {r.id: r.alternatives for r in run.validator.revisions}
    assert any(r.alternatives[0] in beams[r.id] for r in run.validator.edits)
    assert any(r.alternatives[0] not in beams[r.id] for r in run.validator.edits)


@pytest.mark.parametrize("kind", ["gold", "relation"])
def test_evaluating_a_kind_of_targets(tmp_path: Path, run: Callable[..., Ran], kind: str) -> None:
    folder = answerer(tmp_path / "answerer")
    model = load_model(folder, "cpu")
    data = write_revisions(tmp_path / "data.jsonl", model, 20)
    common = ["evaluate", "--model", folder, "--data", data, "--method", "gradient", "--retain", 3, "--device", "cpu"]
    output = ["--output", tmp_path / "run"]
    assert run(*common, *output, "--edits", 4, "--targets", kind, "--json").json["edits"] == 4
    known = {line["id"]: line for line in read_lines(data)}
    for line in read_lines(tmp_path / "run" / "edits.jsonl"):
        revision = known[line["id"]]
        assert line["target"] not in revision["alternatives"]
        assert (line["target"] in revision["answers"]) == (kind == "gold")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["targets"] == kind
    again = run(*common, *output, "--edits", 4)
    assert again.code == 1
    assert "different targets" in again.err
    ran = run(*common, "--output", tmp_path / "other", "--targets", "invented")
    assert ran.code == 1
    assert "no revision has a target of the kind invented" in ran.err


def test_evaluating_a_classifier(checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Ran]) -> None:
    options = ["--method", "gradient", "--targets", "gold", "--output", tmp_path / "run"]
    ran = run("evaluate", "--model", checker, "--data", claims, *options)
    assert ran.code == 1
    assert "a classifier can only be edited to its other labels" in ran.err
