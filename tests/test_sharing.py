"""Sharing editors, patches and ledgers as folders for the hub, and loading them by their names there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Ran, loud_editor
from huggingface_hub import constants
from samples import texts, write_lines

from factpatch.editors import FineTune, HyperNetwork, load_editor
from factpatch.errors import FileError
from factpatch.facts import FactEdit
from factpatch.fingerprints import hash_tensors
from factpatch.ledger import Ledger
from factpatch.models import TaskModel, load_model
from factpatch.patch import Patch
from factpatch.sharing import MOST_FACTS, Card

Run = Callable[..., Ran]
QUESTION = "paris is a city in africa"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(checker: Path) -> TaskModel:
    return load_model(checker, "cpu")


@pytest.fixture(scope="module")
def editor(model: TaskModel) -> HyperNetwork:
    return loud_editor(model)


@pytest.fixture(scope="module")
def patch(model: TaskModel, editor: HyperNetwork) -> Patch:
    return editor.propose(model, [FactEdit(QUESTION, tiny.other_answer(model, QUESTION))])[0]


@pytest.fixture
def upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], None]:
    """Puts a folder where the hub's cache would have it, with the network switched off."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(folder: Path, name: str) -> None:
        place = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, place / "snapshots" / COMMIT)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(COMMIT)

    return put


def shared(run: Run, source: Path, checker: Path, output: Path, *options: object) -> dict[str, Any]:
    about = ("--model", checker, "--base", "ada/checker", "--name", "ada/facts", "--device", "cpu")
    return run("share", source, *about, "--output", output, *options, "--json").json


def test_a_patch_makes_the_round_trip(
    run: Run, patch: Patch, checker: Path, upload: Callable[[Path, str], None], tmp_path: Path
) -> None:
    patch.save(tmp_path / "p.safetensors")
    lines = [{"input": QUESTION, "rephrases": ["a city in africa is paris"]}, *({"input": t} for t in texts(10))]
    others = write_lines(tmp_path / "others.jsonl", lines)
    found = shared(run, tmp_path / "p.safetensors", checker, tmp_path / "out", "--others", others)
    assert None not in (found["success"], found["equivalence"], found["retain"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: ada/checker" in card
    assert 'fp.Patch.load("hub:ada/facts")' in card
    assert f"| success | {found['success']:.3f} |" in card
    assert f"| {QUESTION} | {patch.edits[0].y} | {patch.edits[0].a} |" in card
    assert patch.base in card
    assert str(tmp_path) not in card, "paths of this machine mean nothing to others"
    upload(tmp_path / "out", "ada/facts")
    assert Patch.load("hub:ada/facts") == patch
    assert Patch.load(f"hub:ada/facts@{COMMIT}") == patch
    assert Patch.load(tmp_path / "out") == patch, "a downloaded folder will do, too"
    assert run("patch", "show", "hub:ada/facts", "--json").json["base"] == patch.base


def test_an_editor_makes_the_round_trip(
    run: Run, editor: HyperNetwork, checker: Path, claims: Path, upload: Callable[[Path, str], None], tmp_path: Path
) -> None:
    editor.save(tmp_path / "editor")
    evaluation = ("--editor", tmp_path / "editor", "--data", claims, "--edits", 4, "--output", tmp_path / "eval")
    result = run("evaluate", "--model", checker, *evaluation, "--device", "cpu", "--json").json
    found = shared(run, tmp_path / "editor", checker, tmp_path / "out", "--evaluation", tmp_path / "eval")
    assert found["success"] == result["success"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'fp.load_editor("hub:ada/facts")' in card
    assert f"| retain | {result['retain']:.3f} |" in card
    upload(tmp_path / "out", "ada/facts")
    loaded = load_editor("hub:ada/facts")
    assert hash_tensors(loaded.state_dict()) == hash_tensors(editor.state_dict())
    other = loud_editor(load_model(checker, "cpu"))
    next(other.parameters()).data.add_(1)
    other.save(tmp_path / "other")
    options = ("--model", checker, "--base", "ada/checker", "--name", "ada/facts", "--output", tmp_path / "no")
    refused = run("share", tmp_path / "other", *options, "--evaluation", tmp_path / "eval")
    assert (refused.code, "evaluates another editor" in refused.err) == (1, True)


def test_a_ledger_is_shared_as_of_its_last_transaction(
    run: Run, model: TaskModel, checker: Path, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "mine.db", model, others=texts(10)) as ledger:
        ledger.add(FineTune(lr=1e-2), [FactEdit(QUESTION, tiny.other_answer(model, QUESTION))])
        shared(run, tmp_path / "mine.db", checker, tmp_path / "out")  # while it is open
        expected = ledger.patch()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "facts.db"]
    with Ledger(tmp_path / "out" / "facts.db", model) as copy:
        assert copy.patch() == expected
    assert QUESTION in (tmp_path / "out" / "README.md").read_text()


def test_paths_are_not_looked_up_on_the_hub(
    tmp_path: Path, upload: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    def refuse(*arguments: object, **options: object) -> str:
        raise AssertionError("looked up on the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    for load, kind in ((Patch.load, "patch file"), (load_editor, "editor's folder")):
        with pytest.raises(FileError, match=kind):
            load("runs/x")
        with pytest.raises(FileError, match="for a name on the hub, write hub:ada/facts"):
            load("ada/facts")


def test_hub_names_that_cannot_be_loaded(upload: Callable[[Path, str], None], tmp_path: Path) -> None:
    for load in (Patch.load, load_editor):
        with pytest.raises(FileError, match="was never downloaded, and the hub cannot be reached"):
            load("hub:ada/unknown")
        with pytest.raises(FileError, match="is not a name on the hub"):
            load("hub:a/b/c")


def test_sharing_refuses_what_others_could_not_load(run: Run, checker: Path, patch: Patch, tmp_path: Path) -> None:
    patch.save(tmp_path / "p.safetensors")
    start = ("share", tmp_path / "p.safetensors", "--output", tmp_path / "out", "--model", checker)
    local = run(*start, "--name", "ada/facts")
    assert (local.code, "give the model's name on the hub with --base" in local.err) == (1, True)
    assert run(*start, "--name", "facts", "--base", "ada/checker").code == 2
    (tmp_path / "text.txt").write_text("no patch")
    broken = run("share", tmp_path / "text.txt", *start[2:], "--name", "ada/facts", "--base", "ada/checker")
    assert (broken.code, "not a readable patch file" in broken.err) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_card_lists_many_facts_in_part_and_escapes_tables() -> None:
    facts = [FactEdit(f"who | leads\nnumber {i} ?", "a", "b") for i in range(MOST_FACTS + 2)]
    card = Card("patch", "ada/facts", "world", "0" * 64, "made up.", {"success": 0.5, "retain": None}, facts)
    text = card.to_markdown()
    assert "2 more facts are not listed here." in text
    assert "| who \\| leads number 0 ? | b | a |" in text
    assert "base_model" not in text, "the embedded model is not on the hub"
    assert "| retain |" not in text
    prompted = Card("editor", "ada/e", "ada/m", f"{'0' * 64}/Q: {{}}\nA:", "", {}).to_markdown()
    assert 'fp.load_model("ada/m", template="Q: {}\\nA:")' in prompted
    assert f"`{'0' * 64}`" in prompted
    assert "Not measured." in Card("editor", "ada/e", "ada/m", "0" * 64, "", {}).to_markdown()
