"""Odd paths and options: long names, links, loops, devices, private files and numbers without end."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, loud_editor
from results import write_evaluation

from factpatch.covariance import Covariance
from factpatch.deltas import Dense
from factpatch.editors import load_editor
from factpatch.errors import FactpatchError, FileError, ModelError
from factpatch.facts import FactEdit, read_edits
from factpatch.files import atomic_file, atomic_folder, check_writable, files_into, new_file
from factpatch.ledger import Ledger
from factpatch.models import TaskModel, load_model
from factpatch.patch import Patch
from factpatch.report import read_runs
from factpatch.resumable import ResumableLines
from factpatch.scope import Scope

LONG = "x" * 300


@pytest.fixture
def bert() -> TaskModel:
    return tiny.build("bert")


def test_names_that_are_too_long(tmp_path: Path) -> None:
    for write in (atomic_file, atomic_folder):
        with pytest.raises(FileError, match="File name too long"), write(tmp_path / LONG):
            pass
    with pytest.raises(FileError, match="File name too long"):
        check_writable(tmp_path / LONG)
    for read in (Patch.load, read_edits, lambda path: ResumableLines(path, {})):
        with pytest.raises(FileError):
            read(tmp_path / LONG)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    """Scratch files beside it have names of their own, which must not be longer."""
    longest = "x" * 255
    with atomic_file(tmp_path / longest) as scratch:
        scratch.write_text("new")
    assert (tmp_path / longest).read_text() == "new"
    with atomic_folder(tmp_path / ("y" * 255)) as scratch:
        (scratch / "a").write_text("new")
    lines = ResumableLines(tmp_path / ("z" * 255), {})
    lines.write(["1"])
    lines.finish()
    assert len(list(tmp_path.iterdir())) == 3


def test_links_that_go_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for write in (atomic_file, atomic_folder, files_into):
        with pytest.raises(FileError), write(tmp_path / "a"):
            pass
    for use in (check_writable, Patch.load, read_edits, lambda path: ResumableLines(path, {})):
        with pytest.raises(FileError):
            use(tmp_path / "a")


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    with atomic_file(path) as scratch:
        scratch.write_text("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with files_into(tmp_path) as scratch:
        (scratch / "file").write_text("newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_behind_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_folder(tmp_path / "link") as scratch:
        (scratch / "a").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"


def test_a_part_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    for name in (".out.jsonl.part", ".out.jsonl.part.seconds"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
        with pytest.raises(FileError, match="link"):
            ResumableLines(tmp_path / "out.jsonl", {}).write(["1"])
        (tmp_path / name).unlink()
        assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("device", ["/dev/stdout", "/dev/full", "/dev/null"])
def test_devices_are_not_written(device: str, run: Callable[..., Ran]) -> None:
    given = ("--model", "world", "--editor", "world", "--input", "a", "--target", "b", "--save", device)
    refused = run("edit", *given)
    assert refused.code == 1
    assert "device" in refused.err or device == "/dev/stdout", "which may be a file"


def test_a_killed_writer_leaves_nothing_for_good(tmp_path: Path) -> None:
    """The next writer of the same file removes what a killed one left; a recent scratch file is kept."""
    script = "import os, sys; from factpatch.files import atomic_file\nwith atomic_file(sys.argv[1]): os._exit(9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    with atomic_file(tmp_path / "out") as outer:
        with atomic_file(tmp_path / "out") as inner:
            inner.write_text("inner")
        assert outer.exists()
        outer.write_text("outer")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "outer"


@pytest.mark.parametrize("write", [new_file, atomic_folder, files_into])
def test_every_writer_removes_what_a_killed_one_left(write: Callable[[Path], Any], tmp_path: Path) -> None:
    script = f"import os, sys; from factpatch.files import {write.__name__}\n"
    script += f"with {write.__name__}(sys.argv[1]): os._exit(9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    (left,) = tmp_path.rglob(".*")
    os.utime(left, (0, 0))
    with write(tmp_path / "out") as scratch:
        assert not left.exists()
        (scratch / "a" if scratch.is_dir() else scratch).write_text("new")
    assert not list(tmp_path.rglob(".*"))


def test_arguments_that_are_not_utf8(tmp_path: Path, run: Callable[..., Ran]) -> None:
    text = os.fsdecode(b"caf\xe9")
    for arguments in (
        ["edit", "--model", "world", "--editor", "world", "--input", text, "--target", "b"],
        ["edit", "--model", "world", "--editor", "world", "--input", "a", "--target", text],
        ["ask", "--model", "world", text],
        ["patch", "show", text],
        ["edit", "--model", text, "--editor", "world", "--input", "a", "--target", "b"],
    ):
        command = [sys.executable, "-m", "factpatch", *map(os.fsencode, arguments)]
        ran = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
        assert ran.returncode in (1, 2), ran.stderr
        assert b"Traceback" not in ran.stderr, arguments


@pytest.mark.parametrize("number", ["1e308", "1" + "0" * 23, "inf", "-1e99"])
def test_numbers_without_end(number: str, run: Callable[..., Ran], tmp_path: Path) -> None:
    given = ("--model", "world", "--data", "world", "--method", "finetune", "--output", tmp_path / "out")
    for key in ("lr", "steps"):
        refused = run("evaluate", *given, "--set", f"{key}={number}", "--edits", 1, "--retain", 1)
        assert refused.code == 2
        assert any(limit in refused.err for limit in ("1e+15", "2**63"))
    assert run("evaluate", *given, "--seed", number).code == 2


def test_numbers_that_overflow(bert: TaskModel, run: Callable[..., Ran], tmp_path: Path) -> None:
    on_world = ("--model", "world", "--device", "cpu")
    zhu = ("--data", "world", "--method", "zhu", "--bound", "1e308", "--edits", 1, "--retain", 1)
    refused = run("evaluate", *on_world, *zhu, "--output", tmp_path / "out")
    assert refused.code == 2
    assert "--bound" in refused.err
    for option in ("--epochs", "--minutes"):
        refused = run("fit", *on_world, "--train", "none.jsonl", option, "1e308", "--output", tmp_path / "out")
        assert refused.code == 1
        assert f"{option[2:]}=1e+308 must be at most 1e+15" in refused.err
    Ledger(tmp_path / "facts.db", bert, ["paris"]).close()
    for command in ("show", "remove"):
        for number in (2**63, 10**23):
            refused = run("ledger", command, "--ledger", tmp_path / "facts.db", number)
            assert refused.code == 2
            assert str(2**63 - 1) in refused.err


def test_the_same_patch_has_the_same_bytes(bert: TaskModel, tmp_path: Path) -> None:
    """In every process: Python's and Rust's hash tables order keys differently in each."""
    bert.save(tmp_path / "model")
    script = """
import sys, torch
from factpatch.deltas import Dense
from factpatch.facts import FactEdit
from factpatch.patch import Patch
deltas = {name: Dense(torch.ones(2, 2)) for name in "abcdefgh"}
Patch(deltas, "base", "hyper", (FactEdit("x", "a", "y"),), {"a": 1.0}).save(sys.argv[1])
"""
    for number in range(2):  # that two processes order eight keys alike by chance is all but impossible
        subprocess.run([sys.executable, "-c", script, str(tmp_path / f"{number}.safetensors")], check=True)
    assert len({(tmp_path / f"{number}.safetensors").read_bytes() for number in range(2)}) == 1
    assert Patch.load(tmp_path / "0.safetensors").edits == (FactEdit("x", "a", "y"),)


def test_stacking_patches_takes_time_in_proportion(bert: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applying one more patch computes one change per weight, however many patches are applied already."""
    calls: list[int] = []
    dense = Dense.dense
    monkeypatch.setattr(Dense, "dense", lambda self: calls.append(1) or dense(self))
    name, layer = next(iter(bert.layers.items()))
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    before = weight.clone()
    torch.manual_seed(0)
    changes = [Dense(torch.randn(weight.shape) * 1e-3) for _ in range(20)]
    patches = [Patch({name: change}, bert.fingerprint, "stub", ()) for change in changes]
    for patch in patches:
        patch.apply(bert)
    assert len(calls) == 20
    expected = before.clone()
    for change in changes:
        expected += change.delta
    assert torch.equal(weight, expected)
    patches[3].revert(bert)
    expected = before.clone()
    for change in changes[:3] + changes[4:]:
        expected += change.delta
    assert torch.equal(weight, expected), "the same bits as if it had never been applied"
    for patch in patches[:3] + patches[4:]:
        patch.revert(bert)
    assert torch.equal(weight, before)


def test_an_edit_keeps_its_editor_quiet(bert: TaskModel) -> None:
    assert loud_editor(bert).propose(bert, []) == []
    assert bert.predict_patched([], []) == []
    assert bert.predict(QUESTIONS[:0]) == []


# Files of other people


def devices(folder: Path, name: str) -> Iterator[None]:
    """Replaces a file in the folder by links to a pipe and to a device."""
    pipe = folder.parent / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    for place in (pipe, Path("/dev/zero")):
        (folder / name).unlink()
        (folder / name).symlink_to(place)
        yield


def test_devices_and_pipes_are_not_read(bert: TaskModel, tmp_path: Path) -> None:
    """Reading them would not end, or fill the memory."""
    for name in ("config.json", "editor.safetensors"):
        loud_editor(bert).save(tmp_path / f"{name} editor")
        for _ in devices(tmp_path / f"{name} editor", name):
            with pytest.raises(FileError):
                load_editor(tmp_path / f"{name} editor")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        bert.save(tmp_path / f"{name} model")
        for _ in devices(tmp_path / f"{name} model", name):
            with pytest.raises(FileError, match="a device or a pipe"):
                load_model(tmp_path / f"{name} model", "cpu")
    for name in ("summary.json", "examples.json", "details.safetensors"):
        write_evaluation(tmp_path / f"{name} results")
        for _ in devices(tmp_path / f"{name} results", name):
            with pytest.raises(FactpatchError):
                read_runs([tmp_path / f"{name} results"])
    for load in (Patch.load, Covariance.load, lambda path: Scope.load(path, bert), lambda path: Ledger(path)):
        for place in ("pipe", "/dev/zero"):
            with pytest.raises(FileError):
                load(tmp_path / place)


def test_a_model_is_read_only_from_its_folder(bert: TaskModel, tmp_path: Path) -> None:
    for name in ("other", "index", "adapter"):
        bert.save(tmp_path / name)
    (tmp_path / "index" / "model.safetensors").unlink()
    weights = dict.fromkeys(bert.model.state_dict(), "../other/model.safetensors")
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ModelError, match="not a file in its folder"):
        load_model(tmp_path / "index", "cpu")
    described = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "other")}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="names another model"):
        load_model(tmp_path / "adapter", "cpu")


@pytest.mark.parametrize("name", ["hub:../../x", "hub:/etc/passwd", "hub:a/../b", "hub:a/b@../../x", "hub:a/b@/x"])
def test_names_on_the_hub_are_no_paths(name: str) -> None:
    for load in (Patch.load, load_editor, load_model):
        with pytest.raises(FactpatchError, match="on the hub"):
            load(name)


def test_the_users_umask_decides_who_may_read(bert: TaskModel, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        edit = FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]))
        (patch,) = loud_editor(bert).propose(bert, [edit])
        patch.save(tmp_path / "patch")
        patch.export_peft(tmp_path / "adapter")
        loud_editor(bert).save(tmp_path / "editor")
        bert.save(tmp_path / "model")
        Covariance.compute(bert, QUESTIONS).save(tmp_path / "covariance")
        ledger = Ledger(tmp_path / "facts.db", bert, QUESTIONS)
        ResumableLines(tmp_path / "lines", {}).write(["{}"])
        with files_into(tmp_path / "report") as scratch:
            (scratch / "table.md").write_text("")
        ledger.close()
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert len(found) > 15
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
