"""Files appear complete or not at all, and never replace what does not belong to them."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from factpatch.errors import FileError
from factpatch.files import atomic_file, atomic_folder, check_writable, files_into
from factpatch.resumable import ResumableLines


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
        ResumableLines(tmp_path / "pipe", {})
    with pytest.raises(FileError, match="found a folder"):
        ResumableLines("", {})
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_files_are_for_everybody(tmp_path: Path) -> None:
    """Files have the permissions of new files, though some libraries create private ones."""
    plain = tmp_path / "plain"
    plain.write_text("")
    for path, writer in ((tmp_path / "one", atomic_folder), (tmp_path / "two", files_into)):
        with writer(path) as scratch:
            (scratch / "weights").write_text("")
            (scratch / "weights").chmod(0o600)
        assert (path / "weights").stat().st_mode == plain.stat().st_mode


def test_a_folder_that_cannot_be_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir, prefix: asked.append(dir) or (tmp_path / "x").open("w"))
    (tmp_path / "there").mkdir()
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    assert asked == [tmp_path / "there", tmp_path], "a folder that is there is written into, another is made"


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    """The newer one takes over; the older one can neither mix its lines with the newer one's nor replace them."""
    path = tmp_path / "out.jsonl"
    old = ResumableLines(path, {"s": "A"})
    new = ResumableLines(path, {"s": "B"})
    with pytest.raises(FileError, match="another run is writing"):
        old.write(["1"])
    assert ResumableLines(path, {"s": "B"}).done == 0
    new = ResumableLines(path, {"s": "B"})
    new.write(["1"])
    new = ResumableLines(path, {"s": "B"})
    assert new.done == 1
    new.write(["2"])
    with pytest.raises(FileError, match="another run is writing"):
        old.finish()
    new.finish()
    with pytest.raises(FileError, match="another run is writing"):
        new.write(["3"])
    assert path.read_text() == "1\n2\n"
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys
from factpatch.resumable import ResumableLines
lines = ResumableLines(sys.argv[1], {"s": "A"})
lines.write(["1"])
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("settings", [{"s": "A"}, {"s": "B"}], ids=["same run", "other run"])
def test_two_runs_in_two_processes(tmp_path: Path, settings: dict[str, str]) -> None:
    """The second is refused while the first is alive; a lock dies with its process."""
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            with pytest.raises(FileError, match="another run is writing"):
                ResumableLines(path, settings)
        finally:
            process.kill()
    assert ResumableLines(path, settings).done == (settings == {"s": "A"})


def test_a_header_stays_first_and_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    header = '{"provenance": "été"}'
    ResumableLines(path, {}, header).write(["1", "2", "3"])
    lines = ResumableLines(path, {}, header)
    assert lines.done == 3
    lines.keep(2)
    assert lines.done == 2
    lines.write(["3", "4", "5", "6"])
    lines = ResumableLines(path, {}, header)
    lines.keep(5)
    assert lines.done == 5
    lines.write(["7"])
    assert list(lines.lines()) == ["1", "2", "3", "4", "5", "7"]
    lines.finish()
    assert path.read_text() == f"{header}\n1\n2\n3\n4\n5\n7\n"
    assert ResumableLines(path, {}, '{"another": 1}').done == 0


def test_a_part_that_was_cut_inside_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = ResumableLines(path, {"s": "A"})
    content = lines.part.read_bytes()
    lines.part.write_bytes(content[:-4])
    lines = ResumableLines(path, {"s": "A"})
    assert lines.done == 0
    lines.write(["1"])
    assert lines.part.read_bytes().startswith(content)
    assert list(lines.lines()) == ["1"]


def test_damaged_lines_of_a_part_are_written_again(tmp_path: Path) -> None:
    """A line that was changed, moved or removed by hand is not part of the result."""
    path = tmp_path / "out.jsonl"
    for damage in (
        lambda run, a, b, c: [run, b, a, c],
        lambda run, a, b, c: [run, a, c],
        lambda run, a, b, c: [run, a, b.replace(b'"2"', b'"7"'), c],
        lambda run, a, b, c: [run, a, a, c],
        lambda run, a, b, c: [run, b"\n", a, b, c],
    ):
        lines = ResumableLines(path, {})
        lines.keep(0)
        lines.write(['{"id": "1"}', '{"id": "2"}', '{"id": "3"}'])
        lines.part.write_bytes(b"".join(damage(*lines.part.read_bytes().splitlines(keepends=True))))
        again = ResumableLines(path, {})
        assert list(again.lines()) == [f'{{"id": "{i + 1}"}}' for i in range(again.done)]
        assert again.done < 2
        again.write([f'{{"id": "{i + 1}"}}' for i in range(again.done, 3)])
        again.finish()
        assert path.read_text() == '{"id": "1"}\n{"id": "2"}\n{"id": "3"}\n'


def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed when the object is deleted; a second error there would be printed with a traceback."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    lines = ResumableLines(tmp_path / "out", {})
    full = open("/dev/full", "wb")  # noqa: SIM115 (closed by the object under test)
    os.dup2(full.fileno(), lines._file.fileno())
    with pytest.raises(FileError, match="No space left"):
        lines.write(["{}"])
    full.close()
    del lines
    gc.collect()
    assert not ignored


@pytest.mark.parametrize("damaged", [b"\x80", b"\0", b"x", b"nan", b"-1", b"inf", b""])
def test_a_damaged_time_counts_as_none(tmp_path: Path, damaged: bytes) -> None:
    ResumableLines(tmp_path / "out", {}).write(["{}"])
    (tmp_path / ".out.part.seconds").write_bytes(damaged)
    lines = ResumableLines(tmp_path / "out", {})
    assert lines.done == 1
    assert 0 <= lines.seconds() < 1000


def test_a_move_that_fails_half_way_says_what_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_text("old")
    (tmp_path / "c").write_text("old")
    message = "Replaced: a; not replaced: b, c"
    with pytest.raises(FileError, match=message) as error, files_into(tmp_path) as scratch:
        for name in "abc":
            (scratch / name).write_text("new")
    assert "Nothing was changed" not in str(error.value)
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "c").read_text() == "old"
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    with pytest.raises(FileError, match="Nothing was changed"), files_into(tmp_path) as scratch:
        (scratch / "a").write_text("newer")


def test_a_folder_returns_if_its_successor_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with atomic_folder(tmp_path / "run") as scratch:
        (scratch / "a").write_text("old")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if (Path(source) / "a").exists() and (Path(source) / "a").read_text() == "new":
            raise OSError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(FileError, match="Permission denied"), atomic_folder(tmp_path / "run") as scratch:
        (scratch / "a").write_text("new")
    assert (tmp_path / "run" / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_seconds_count_all_starts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResumableLines(path, {})
    first._begin -= 100
    first.write(["1"])
    assert 100 <= ResumableLines(path, {}).seconds() < 200
    assert ResumableLines(path, {"other": 1}).seconds() < 100
