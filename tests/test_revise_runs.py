"""Runs of `revise` that are interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import HANG, forked, wait_for
from samples import fact_checker, read_lines, texts, write_lines

from factpatch.data import revise as revise_module
from factpatch.data.chunked import write_in_chunks
from factpatch.data.formats import Record
from factpatch.data.records import read_records
from factpatch.data.revise import revise, revise_records
from factpatch.errors import FileError
from factpatch.models import TaskModel, load_model

OLD = '{"provenance": "of an older run"}\n'


def stuck_at_the_third_chunk(folder: Path, source: Path, output: Path) -> None:
    """Revises in a process of its own until it is killed."""
    chunks = 0

    def revise_two_chunks(*arguments: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            time.sleep(HANG)
        return revise_records(*arguments)

    revise_module.revise_records = revise_two_chunks
    revise(load_model(folder, "cpu"), source, output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fact_checker(tmp_path_factory.mktemp("models") / "checker")


@pytest.fixture(scope="module")
def checker(folder: Path) -> TaskModel:
    return load_model(folder, "cpu")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(revise_module.CHUNK, "cpu", 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [{"input": text} for text in texts(30, seed=5)])


@pytest.fixture
def whole(checker: TaskModel, source: Path, tmp_path: Path, small_chunks: None) -> bytes:
    """What an uninterrupted run writes."""
    revise(checker, source, tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes()


class Revised:
    """Counts the records that are revised; fails at one of the chunks if asked to."""

    def __init__(self, fail_at: int = 0):
        self.records, self.chunks, self.fail_at = 0, 0, fail_at

    def __call__(self, model: TaskModel, records: list[Record], encoded: Any) -> Any:
        self.chunks += 1
        if self.chunks == self.fail_at:
            raise RuntimeError("the machine went down")
        self.records += len(records)
        return revise_records(model, records, encoded)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def scratch_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_a_chunk_is_prepared_while_the_one_before_is_worked_on(source: Path, tmp_path: Path) -> None:
    prepared: list[str] = []
    following = threading.Event()

    def prepare(chunk: list[Record]) -> list[str]:
        prepared.append(chunk[0].id)
        if len(prepared) == 2:
            following.set()
        return [record.id for record in chunk]

    def work(ids: list[str]) -> list[str]:
        assert following.wait(600)
        return ids

    write_in_chunks(
        *(source, tmp_path / "ids", prepare, work),
        settings={},
        size=20,
        check=lambda record: None,
        skip_bad=False,
        on_done=lambda number: None,
    )
    assert (tmp_path / "ids").read_text().split() == [record.id for record in read_records(source)]


def test_a_failed_run_leaves_the_old_file_and_can_be_resumed(
    checker: TaskModel, source: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(OLD)
    monkeypatch.setattr(revise_module, "revise_records", Revised(fail_at=4))
    with pytest.raises(RuntimeError):
        revise(checker, source, output)
    assert output.read_text() == OLD

    rest = Revised()
    progress: list[int] = []
    monkeypatch.setattr(revise_module, "revise_records", rest)
    result = revise(checker, source, output, on_done=progress.append)
    assert output.read_bytes() == whole
    assert rest.records == 30 - 10
    assert progress[0] == 10
    assert sum(progress) == result["kept"] == result["records"] == 30
    assert scratch_of(tmp_path) == []


def test_a_full_disk_half_way(
    checker: TaskModel, source: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(OLD)
    calls: list[int] = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FileError, match=r"cannot write .*out.jsonl: No space left on device"):
            revise(checker, source, output)
    assert output.read_text() == OLD
    assert revise(checker, source, output)["kept"] == 30
    assert output.read_bytes() == whole


def test_a_killed_run_resumes_where_it_stopped(
    folder: Path,
    checker: TaskModel,
    source: Path,
    whole: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out.jsonl"
    part = tmp_path / ".out.jsonl.part"
    process = forked(stuck_at_the_third_chunk, folder, source, output)
    try:
        wait_for(process, lambda: lines_of(part) >= 1 + 2 + 4)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, "the run must not have ended by itself"
    assert not output.exists()

    rest = Revised()
    monkeypatch.setattr(revise_module, "revise_records", rest)
    revise(checker, source, output)
    assert rest.records == 30 - 6
    assert output.read_bytes() == whole


def leave_a_part(checker: TaskModel, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leaves the part file of a run that failed at its third chunk: six lines after the provenance record."""
    with monkeypatch.context() as patched:
        patched.setattr(revise_module, "revise_records", Revised(fail_at=3))
        with pytest.raises(RuntimeError):
            revise(checker, source, output)
    part = output.with_name(f".{output.name}.part")
    assert lines_of(part) == 1 + 6  # after the line that describes the run
    return part


@pytest.mark.parametrize("torn", [b'{"id": "record-7", "inp', b'{"id": "record-7"}\n', b'{"id": "record-7"}\n{"id'])
def test_a_torn_end_of_a_part_is_cut_off(
    checker: TaskModel, source: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    part = leave_a_part(checker, source, tmp_path / "out.jsonl", monkeypatch)
    with part.open("ab") as file:
        file.write(torn)
    rest = Revised()
    monkeypatch.setattr(revise_module, "revise_records", rest)
    revise(checker, source, tmp_path / "out.jsonl")
    assert rest.records == 30 - 6
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("other", ["data", "model", "labels", "chunk"])
def test_a_part_of_another_run_is_not_resumed(
    checker: TaskModel, source: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A model with other labels counts as another model, even if its layers are the same."""
    leave_a_part(checker, source, tmp_path / "out.jsonl", monkeypatch)
    model = checker
    if other == "data":
        write_lines(source, [*read_lines(source)[:-1], {"input": "another last question"}])
    elif other == "model":
        model = load_model(fact_checker(tmp_path / "model", seed=1), "cpu")
    elif other == "labels":
        checker.save(tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        config["id2label"] = dict(enumerate(reversed(config["id2label"].values())))
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        model = load_model(tmp_path / "model", "cpu")
        assert model.fingerprint == checker.fingerprint
    else:
        monkeypatch.setitem(revise_module.CHUNK, "cpu", 5)
    anew = Revised()
    monkeypatch.setattr(revise_module, "revise_records", anew)
    revise(model, source, tmp_path / "out.jsonl")
    assert anew.records == 30
    assert ((tmp_path / "out.jsonl").read_bytes() == whole) is (other == "chunk")
