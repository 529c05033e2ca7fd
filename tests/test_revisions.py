"""Revision files: which model made them, and which inputs are forms of the edited fact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from samples import fact_checker, read_lines, texts, write_lines, write_revisions

from factpatch.data.records import source_hash
from factpatch.data.revise import revise
from factpatch.data.revisions import Provenance, Revision, load_revisions, own_forms, read_revisions
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.models import TaskModel, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TaskModel:
    return load_model(fact_checker(tmp_path_factory.mktemp("models") / "checker"), "cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "data.jsonl", [{"input": text} for text in texts(12)])


@pytest.fixture
def made(model: TaskModel, data: Path, tmp_path: Path) -> Path:
    """A file as `revise` writes it."""
    revise(model, data, tmp_path / "made.jsonl")
    return tmp_path / "made.jsonl"


def with_warnings(path: Path, model: TaskModel) -> tuple[list[Revision], list[str]]:
    warnings: list[str] = []
    return load_revisions(path, model, warn=warnings.append), warnings


def test_revise_records_the_model_the_data_and_the_settings(model: TaskModel, data: Path, made: Path) -> None:
    first, *lines = read_lines(made)
    settings = {"dtype": "float32"}
    assert first == {"provenance": {"model": model.identity, "data": source_hash(data), "settings": settings}}
    assert len(lines) == 12
    found, warnings = with_warnings(made, model)
    assert found == list(read_revisions(made))
    assert (len(found), warnings) == (12, [])


def test_a_file_of_another_model_is_refused(made: Path) -> None:
    other = tiny.build("bert", seed=1)
    with pytest.raises(MismatchError, match=r"made.jsonl was made by model \w{12}, this is model \w{12}; make a file"):
        load_revisions(made, other)
    with pytest.raises(MismatchError):
        load_revisions(made, other, on_bad=lambda message: None)


def test_a_file_without_provenance_is_accepted_with_a_note(model: TaskModel, tmp_path: Path) -> None:
    """Such as a file written by hand, or by an earlier version."""
    path = write_revisions(tmp_path / "own.jsonl", model, 5)
    found, warnings = with_warnings(path, model)
    assert len(found) == 5
    assert warnings == [f"{path} has no provenance record; its predictions are taken as this model's"]


def test_an_input_that_the_model_cannot_read_is_named_with_its_line(model: TaskModel, tmp_path: Path) -> None:
    lines = read_lines(write_revisions(tmp_path / "own.jsonl", model, 3))
    lines[1]["input"] = "capital " * 99
    path = write_lines(tmp_path / "own.jsonl", lines)
    with pytest.raises(InputError, match=r"own.jsonl, line 2: the model reads at most"):
        load_revisions(path, model)
    bad: list[str] = []
    assert len(load_revisions(path, model, bad.append)) == 2
    assert len(bad) == 1


def test_a_part_of_a_file_keeps_its_provenance(model: TaskModel, made: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.jsonl"
    head.write_text("".join(made.read_text().splitlines(keepends=True)[:5]))
    found, warnings = with_warnings(head, model)
    assert (len(found), warnings) == (4, [])


def test_files_of_one_source_can_be_joined(model: TaskModel, made: Path, tmp_path: Path) -> None:
    (tmp_path / "joined.jsonl").write_text(made.read_text() * 2)
    assert len(load_revisions(tmp_path / "joined.jsonl", model)) == 24


def test_files_of_two_sources_are_refused(made: Path, tmp_path: Path) -> None:
    provenance = Provenance(**read_lines(made)[0]["provenance"])
    content = made.read_text()
    own = content.split("\n", 1)[1]
    firsts = [replace(provenance, model="0" * 64), replace(provenance, data="0" * 64), replace(provenance, settings={})]
    joined = [content + first.to_json() + "\n" + own for first in firsts]
    joined += [content.replace(own, first.to_json() + "\n" + own) for first in firsts]  # an empty file, then another
    for text in [*joined, own + content]:
        (tmp_path / "joined.jsonl").write_text(text)
        for on_bad in (None, lambda message: None):
            with pytest.raises(MismatchError, match=r"joined.jsonl mixes .*; use a separate file for each"):
                list(read_revisions(tmp_path / "joined.jsonl", on_bad))


@pytest.mark.parametrize("damage", [3, {}, {"model": "a", "data": "b"}, {"model": 1, "data": "b", "settings": {}}])
def test_a_damaged_provenance_record_is_never_skipped(
    model: TaskModel, made: Path, tmp_path: Path, damage: object
) -> None:
    path = write_lines(tmp_path / "damaged.jsonl", [{"provenance": damage}, *read_lines(made)[1:]])
    for on_bad in (None, lambda message: None):
        with pytest.raises(FileError, match="its provenance record is damaged; remake it with factpatch revise"):
            load_revisions(path, model, on_bad)


def test_an_input_and_its_paraphrases_are_no_control_inputs() -> None:
    revision = Revision("1", "Where is Besançon?", "Chad", ("France",), ("besançon is WHERE",), ("In which land?",), ())
    assert own_forms(revision) == {"whereisbesançon", "besançoniswhere", "inwhichland"}


def test_revisions_of_one_model_are_data_for_another(made: Path, tmp_path: Path) -> None:
    other = load_model(fact_checker(tmp_path / "other", seed=1), "cpu")
    result = revise(other, made, tmp_path / "out.jsonl")
    assert (result["records"], result["kept"], result["bad"]) == (12, 12, 0)
    assert [r.id for r in load_revisions(tmp_path / "out.jsonl", other)] == [r.id for r in read_revisions(made)]
