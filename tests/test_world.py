"""The embedded world: its facts are well-formed, nothing leaks into training, and it works when installed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran
from processes import HANG

from factpatch import demo, world
from factpatch.data.revisions import edit_of, load_revisions
from factpatch.editors import load_editor
from factpatch.facts import normalize, same
from factpatch.models import load_model
from factpatch.patch import Patch
from factpatch.scope import Scope

ROOT = Path(__file__).parent.parent
ARTICLES = {"the", "a", "an"}


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - ARTICLES


def test_facts_are_many_and_of_one_form() -> None:
    facts = world.facts()
    assert len(facts) >= 2000
    assert len({fact.id for fact in facts}) == len(facts)
    assert {fact.relation for fact in facts} == set(world.relations())
    for fact in facts:
        assert fact.subject == fact.subject.strip() != ""
        assert fact.answer == fact.answer.strip() != ""
        assert len(fact.answer.split()) <= 5
        assert not any(character in fact.subject + fact.answer for character in "{}\n\t")


def test_wordings() -> None:
    """Each relation has its own wordings: twelve or more to train on, and two held out."""
    seen: dict[str, str] = {}
    for name, relation in world.relations().items():
        assert len(relation.wordings) >= 12
        assert len(relation.held_out) == 2
        for wording in (*relation.wordings, *relation.held_out):
            assert wording.count("{}") == 1
            assert wording.endswith("?")
            assert seen.setdefault(normalize(wording), name) == name
        assert len({normalize(w) for w in (*relation.wordings, *relation.held_out)}) >= 12


def test_held_out_wordings_are_other_words() -> None:
    """A held-out wording is not a trained one in another order, or with another article or comma."""
    for relation in world.relations().values():
        for held_out in relation.held_out:
            for trained in relation.wordings:
                assert len(words(held_out) ^ words(trained)) >= 5, (held_out, trained)


def test_changes_differ_from_2018() -> None:
    changes = world.changes()
    assert len(changes) >= 25
    assert len({change.fact.id for change in changes}) == len(changes)
    for change in changes:
        assert normalize(change.answer) != normalize(change.fact.answer)
        assert 2018 <= change.year <= 2026
        assert len(change.source.split()) >= 3
    lines = [json.loads(line) for line in (world.FOLDER / "changes.jsonl").read_text().splitlines()]
    for line, change in zip(lines, changes, strict=True):
        assert line["before"] == change.fact.answer


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tests import the tools that make the world, which are scripts and no package."""
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.fixture
def training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A small sample of what the model and the editor are trained on."""
    import world_data

    for name, value in {"TYPED": 5, "MADE_UP": 200, "EDITS_PER_FACT": {True: 2, False: 1}, "NEW_SUBJECTS": 50}.items():
        monkeypatch.setattr(world_data, name, value)
    world_data.write_data(tmp_path, load_model("world", "cpu").tokenizer, seed=0)
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [file.name for file in files] == ["edits.jsonl", "train.jsonl", "valid.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_no_held_out_wording_is_trained_on(training_data: list[dict[str, Any]]) -> None:
    """Neither the model nor the editor is trained on a held-out wording, in any case or punctuation."""
    held_out = {normalize(question) for fact in world.facts() for question in fact.held_out}
    for record in training_data:
        for text in (record["input"], *record.get("human_rephrases", ())):
            assert normalize(text) not in held_out


def test_no_change_is_trained_on(training_data: list[dict[str, Any]]) -> None:
    """A new answer may be read as a name or answer another fact, but never stands in one line with its own fact."""
    from world_names import Names

    answers = {change.fact.id: change.answer for change in world.changes()}
    asked = {normalize(q): c.answer for c in world.changes() for q in (*c.fact.questions, *c.fact.held_out)}
    for record in training_data:
        fact = "/".join(record["id"].split("/")[:2])
        assert answers.get(fact, "") != record["output"]
        assert asked.get(normalize(record["input"]), "") != record["output"]
    names, rng = Names(), random.Random(0)
    for change in world.changes():
        targets = names.targets(change.fact, 30, rng)
        assert not {change.answer, change.fact.answer} & set(targets)
        assert len(set(targets)) > 5


def test_questions_are_typed_in_many_ways() -> None:
    """Typed questions differ in wording, case and spelling; held-out wordings are never typed for training."""
    from world_typing import Typist, split_wordings

    typist, rng = Typist(), random.Random(0)
    for relation in world.relations():
        groups, held_out = split_wordings(relation)
        assert len(held_out) > 10
        assert not {text for group in groups for text in group} & set(held_out)
        fact = next(fact for fact in world.facts() if fact.relation == relation)
        typed = typist.questions(fact, 50, rng)
        assert len({normalize(text) for text in typed}) > 25
        assert any(text.islower() for text in typed)
        assert any(text.endswith("?") for text in typed)
        assert any(not text.endswith("?") for text in typed)


def test_made_up_names_are_new_and_of_every_length() -> None:
    from world_names import Names, names_to_check

    names, rng = Names(), random.Random(0)
    made_up = [names.made_up(rng) for _ in range(2000)]
    assert {len(name.split()) for name in made_up} == set(range(1, 7))
    assert len(set(made_up) - set(names.known)) > 1500
    checked = names_to_check()
    assert len(checked) == len(set(checked)) == 200
    assert not set(checked) & {*names.known, *names.common}


# What ships


def test_the_merged_patch_holds_all_changes_and_knows_no_spare_fact() -> None:
    model = load_model("world", "cpu")
    patch = Patch.load(world.MERGED)
    patch.check_fits(model)
    wanted = {replace(edit_of(revision), subject=None) for revision in demo.outdated(model)}
    assert {replace(edit, subject=None) for edit in patch.edits} == wanted
    assert 300 < len(world.spare()) < 600
    assert not {fact.id for fact in world.spare()} & world.changed()


def test_the_model_and_its_editor_go_together() -> None:
    model = load_model("world", "cpu")
    editor = load_editor("world")
    assert editor.base == model.fingerprint
    assert model.model.dtype == torch.float32
    sample = world.facts()[::37]
    said = model.predict([fact.questions[0] for fact in sample])
    known = [normalize(text) == normalize(fact.answer) for text, fact in zip(said, sample, strict=True)]
    assert sum(known) / len(known) >= 0.9


def test_the_model_reads_questions_as_people_type_them() -> None:
    from world_typing import questions_to_check

    answers = {fact.id: fact.answer for fact in world.facts()}
    asked = questions_to_check()
    said = load_model("world", "cpu").predict([question["question"] for question in asked])
    wanted = [answers[f"{question['relation']}/{question['subject']}"] for question in asked]
    assert sum(map(same, said, wanted)) >= 0.95 * len(asked)


def test_the_revision_file_is_the_models_own(run: Callable[..., Ran], tmp_path: Path) -> None:
    """After a change of the model or of its identity: python tools/make_world.py --stage revisions."""
    assert world.REVISIONS.stat().st_size < 300_000
    notes: list[str] = []
    revisions = load_revisions("world", load_model("world", "cpu"), warn=notes.append)
    assert not notes, "it has a provenance record"
    edits = {revision.id: revision for revision in revisions if revision.alternatives}
    assert {id: revision.alternatives for id, revision in edits.items()} == {
        change.fact.id: (change.answer,) for change in world.changes()
    }
    assert len(revisions) - len(edits) >= 300
    beside = [neighbour for revision in edits.values() for neighbour in revision.neighbours]
    assert len(beside) > 3 * len(edits), "other facts about the same topic"
    assert sum(bool(revision.rephrases) for revision in revisions) > 0.9 * len(revisions)
    given = ("--model", "world", "--editor", "world", "--data", "world", "--device", "cpu")
    measured = run("evaluate", *given, "--output", tmp_path / "out", "--edits", 2, "--retain", 5, "--json").json
    assert (measured["edits"], measured["retain_inputs"]) == (2, 5)


def test_the_scope_recognises_held_out_wordings() -> None:
    """Each change is recognised in words that nothing was trained on, and questions about other facts are not."""
    model = load_model("world", "cpu")
    active = [change.fact for change in world.changes()]
    scope = Scope.load(world.SCOPE, model).index([fact.questions[0] for fact in active])
    found = scope.match([fact.held_out[0] for fact in active])
    assert sum(number == n for n, number in enumerate(found)) >= 0.97 * len(active)
    others = [fact.held_out[0] for fact in world.facts() if fact.id not in world.changed()][::4]
    assert sum(number is not None for number in scope.match(others)) <= 0.01 * len(others)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment of its own, which borrows its dependencies from this one."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        files = [one for one in packed.infolist() if one.filename.startswith("factpatch/world/")]
        needed = {"factpatch/world/revisions.jsonl.gz", "factpatch/world/scope.safetensors", "factpatch/serve/page.css"}
        assert needed <= set(packed.namelist())
    assert len(files) >= 12
    assert sum(one.file_size for one in files) <= 25_000_000
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    borrowed = Path(torch.__file__).parent.parent
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return folder / "env" / "bin" / "python"


def test_the_demo_runs_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    command = [str(installed), "-I", "-m", "factpatch", "demo", "--json", "--device", "cpu"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=HANG)
    result = json.loads(ran.stdout)
    where = subprocess.run(
        [str(installed), "-I", "-c", "import factpatch; print(factpatch.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(installed.parent.parent) in where.stdout
    assert result["edits"] >= 25
    assert result["success"] >= 0.9
    assert result["retain"] >= 0.95
    assert result["load_seconds"] > 0
