"""Commands never replace files that they did not write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ran, loud_editor
from samples import write_lines

from factpatch.errors import FileError
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.models import load_model
from factpatch.patch import Patch
from factpatch.resumable import ResumableLines

SAVED = "summary.json", "edits.jsonl", "details.safetensors", "examples.json"


@pytest.fixture
def place(checker: Path, claims: Path, tmp_path: Path) -> Path:
    """A folder with a model, an editor, data and revisions."""
    shutil.copytree(checker, tmp_path / "model")
    loud_editor(load_model(checker, "cpu")).save(tmp_path / "editor")
    shutil.copy(claims, tmp_path / "revisions.jsonl")
    write_lines(tmp_path / "data.jsonl", [{"input": f"paris is city {i}"} for i in range(3)])
    return tmp_path


def evaluate(run: Callable[..., Ran], place: Path, output: Path, data: Path | None = None) -> Ran:
    files = ("--model", place / "model", "--editor", place / "editor", "--data", data or place / "revisions.jsonl")
    return run("evaluate", *files, "--output", output, "--edits", 2, "--retain", 4, "--device", "cpu")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_evaluate_keeps_its_data(run: Callable[..., Ran], place: Path) -> None:
    data = (place / "revisions.jsonl").rename(place / "edits.jsonl")
    before = contents(place)
    refused = evaluate(run, place, place, data)
    assert refused.code == 1
    assert f"{place / 'edits.jsonl'} is not" in refused.err
    assert contents(place) == before


@pytest.mark.parametrize("name", [*SAVED, "together.jsonl"])
def test_evaluate_keeps_other_files(run: Callable[..., Ran], place: Path, name: str) -> None:
    output = place / "results"
    output.mkdir()
    (output / name).write_text('{"mine": 1}\n')
    refused = evaluate(run, place, output)
    assert refused.code == 1
    assert name in refused.err
    assert contents(output) == {name: b'{"mine": 1}\n'}


def test_evaluate_replaces_its_own_files(run: Callable[..., Ran], place: Path) -> None:
    """A run that was killed just before it wrote its summary leaves all other files."""
    output = place / "results"
    assert evaluate(run, place, output).code == 0
    before = contents(output)
    assert before.keys() == set(SAVED)
    (output / "summary.json").unlink()
    assert evaluate(run, place, output).code == 0
    assert contents(output)["edits.jsonl"] == before["edits.jsonl"]


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "editor/config.json", "data.jsonl"])
def test_revise_keeps_other_files(run: Callable[..., Ran], place: Path, name: str) -> None:
    write_lines(place / "other.jsonl", [{"input": "paris"}])
    before = contents(place)
    files = ("--model", place / "model", "--data", place / "other.jsonl", "--output", place / name)
    refused = run("revise", *files, "--device", "cpu")
    assert refused.code == 1
    assert name in refused.err
    assert contents(place) == before


def test_revise_replaces_older_revisions(run: Callable[..., Ran], place: Path) -> None:
    files = ("--model", place / "model", "--data", place / "data.jsonl", "--output", place / "new.jsonl")
    for _ in range(2):
        assert run("revise", *files, "--device", "cpu", "--json").json["kept"] == 3


@pytest.mark.parametrize("name", ["model/model.safetensors", "editor/editor.safetensors", "data.jsonl", "patch"])
def test_edit_keeps_other_files(run: Callable[..., Ran], place: Path, name: str) -> None:
    (place / "patch").write_bytes(b"older")
    before = contents(place)
    files = ("--model", place / "model", "--editor", place / "editor", "--save", place / name)
    refused = run("edit", *files, "--input", "paris", "--target", "REFUTES", "--device", "cpu")
    assert refused.code == 1
    assert name in refused.err
    assert "choose another --save" in refused.err
    assert contents(place) == before


@pytest.mark.parametrize("name", ["model/model.safetensors", "editor/config.json", "data.jsonl", "older.safetensors"])
def test_new_files_keep_other_files(run: Callable[..., Ran], place: Path, name: str) -> None:
    """`patch merge`, `ledger export`, `scope train` and `split` write new files only, before any work is done."""
    model = load_model(place / "model", "cpu")
    Patch({}, model.fingerprint, "stub", (FactEdit("paris", "REFUTES", "SUPPORTS"),)).save(place / "older.safetensors")
    Ledger(place / "facts.db", model, ["paris"]).close()
    output = place / name
    before = contents(place)
    on_model = ("--model", place / "model", "--output", output, "--device", "cpu")
    for command in (
        ("patch", "merge", place / "older.safetensors", *on_model, "--others", place / "data.jsonl"),
        ("ledger", "export", "--ledger", place / "facts.db", *on_model),
        ("scope", "train", *on_model, "--data", place / "revisions.jsonl"),
        ("split", place / "revisions.jsonl", "--train", output, "--dev", place / "dev.jsonl"),
        ("split", place / "revisions.jsonl", "--train", place / "train.jsonl", "--dev", output),
    ):
        refused = run(*command)
        assert refused.code == 1
        assert "exists" in refused.err.replace("\n", " ")
        assert contents(place) == before, command


def test_lines_replace_only_lines_of_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for foreign in ("[1]\n", '{"other": 1}\n', "\udcff", '{"a"'):
        path.write_text(foreign, errors="surrogateescape")
        with pytest.raises(FileError, match="not replaced"):
            ResumableLines(path, {}, key="id")
        assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]
    for own in ('{"id": 1}\n{"id": 2}\n', ""):
        path.write_text(own)
        lines = ResumableLines(path, {}, key="id")
        lines.write([json.dumps({"id": 3})])
        lines.finish()
        assert path.read_text() == '{"id": 3}\n'
