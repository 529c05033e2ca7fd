"""Files appear whole or not at all, and never in place of what is not theirs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from factpatch.errors import FileError
from factpatch.files import ResumableLines, atomic_file, atomic_folder, check_writable, files_into


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_file(tmp_path / "link") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_pipes_and_nameless_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="a device or a pipe"), atomic_file(tmp_path / "pipe"):
        pass
    with pytest.raises(FileError, match="a device or a pipe"):
        ResumableLines(tmp_path / "pipe", {}, 1)
    with pytest.raises(FileError, match="found a folder"):
        ResumableLines("", {}, 1)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_files_are_for_everybody(tmp_path: Path) -> None:
    """As new files are here; some libraries make theirs their owner's alone."""
    plain = tmp_path / "plain"
    plain.write_text("")
    for place, writer in ((tmp_path / "one", atomic_folder), (tmp_path / "two", files_into)):
        with writer(place) as scratch:
            (scratch / "weights").write_text("")
            (scratch / "weights").chmod(0o600)
        assert (place / "weights").stat().st_mode == plain.stat().st_mode


def test_a_folder_that_cannot_be_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir, prefix: asked.append(dir) or (tmp_path / "x").open("w"))
    (tmp_path / "there").mkdir()
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    assert asked == [tmp_path / "there", tmp_path], "a folder that is there is written into, another is made"


def test_two_runs_with_one_output(tmp_path: Path) -> None:
    """The slower one stops before it mixes its lines with the other's, and before it replaces them."""
    place = tmp_path / "out.jsonl"
    slow = ResumableLines(place, {}, 1)
    slow.write(["1"])
    fast = ResumableLines(place, {}, 1)
    assert fast.done == 1
    fast.write(["2"])
    with pytest.raises(FileError, match="another run is writing"):
        slow.write(["2"])
    fast.finish()
    with pytest.raises(FileError, match="another run is writing"):
        slow.write(["2"])
    with pytest.raises(FileError, match="another run is writing"):
        slow.finish()
    assert place.read_text() == "1\n2\n"
    assert list(tmp_path.iterdir()) == [place]


def test_seconds_count_all_starts(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    first = ResumableLines(place, {}, 1)
    first._begin -= 100
    first.write(["1"])
    assert 100 <= ResumableLines(place, {}, 1).seconds() < 200
    assert ResumableLines(place, {"other": 1}, 1).seconds() < 100
