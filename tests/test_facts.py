"""Facts, their comparison, and JSON lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from factpatch.errors import FileError, InputError
from factpatch.facts import FactEdit, normalize, read_edits, same
from factpatch.files import atomic_file, atomic_folder


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("Addis Ababa", "addis-ababa.", True),
        ("N'Djamena", "NDjamena", True),
        ("Paris", "Lyon", False),
        ("C", "C++", False),
        ("?", "!", False),
        ("São Tomé", "sao tome", False),
        ("Besan\u00e7on", "Besanc\u0327on", True),  # NFC and NFD
        ("BESAN\u00c7ON", "besanc\u0327on", True),
    ],
)
def test_answers_are_compared_without_case_punctuation_and_spaces(a: str, b: str, equal: bool) -> None:
    assert same(a, b) is equal


def test_normalize_never_makes_something_nothing() -> None:
    assert normalize(" ... ") == "..."


def test_edits_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    lines = '{"input": "x", "target": "a"}\n\n{"input": "x2", "target": "a2", "prediction": "y2"}\n'
    (tmp_path / "f.jsonl").write_text(lines)
    with gzip.open(tmp_path / "f.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("f.jsonl", "f.jsonl.gz"):
        assert read_edits(tmp_path / name) == ([FactEdit("x", "a"), FactEdit("x2", "a2", "y2")], 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{nonsense", "syntax error"),
        (b"[1, 2]", "found list"),
        (b'{"input": "x"}', 'a text in "target", found null'),
        (b'{"input": 3, "target": "a"}', 'a text in "input", found 3'),
        (b'{"input": "\xff", "target": "a"}', "expected UTF-8, found byte 0xff"),
        (b'{"input": "\\ud83d", "target": "a"}', "half of a surrogate pair"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"input": ' + b"1" * 5000 + b"}", "cannot be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b'{"input": "x", "target": "a"}\n'
    path = tmp_path / "f.jsonl"
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(InputError, match="line 2: .*" + reason.replace("(", r"\(")):
        read_edits(path)
    edits, bad = read_edits(path, skip_bad=True)
    assert (len(edits), bad) == (2, 1)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text("\n")
    with pytest.raises(InputError, match="found none"):
        read_edits(tmp_path / "f.jsonl")
    with pytest.raises(FileError, match="cannot read"):
        read_edits(tmp_path / "none.jsonl")
    (tmp_path / "f.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(FileError, match="cannot read"):
        read_edits(tmp_path / "f.jsonl.gz")


def test_a_cut_line_is_named_at_its_own_end(tmp_path: Path) -> None:
    for cut, column in (('{"input": "x",', 15), ('{"input": ', 11), ('{"input"', 9)):
        (tmp_path / "f.jsonl").write_text(f'{cut}\n{{"input": "x", "target": "a"}}\n')
        with pytest.raises(
            InputError, match=f"line 1: expected a JSON object, found a syntax error at column {column}:"
        ):
            read_edits(tmp_path / "f.jsonl")


def test_gzip_under_another_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(gzip.compress(b'{"input": "x", "target": "a"}\n'))
    for skip_bad in (False, True):
        with pytest.raises(FileError, match="found gzip; rename the file so that it ends in"):
            read_edits(tmp_path / "f.jsonl", skip_bad)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with atomic_folder(place) as scratch:
        (scratch / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_folder(place) as scratch:
        (scratch / "a").write_text("new")
        _ = 1 / 0
    assert (place / "a").read_text() == "old"
    with atomic_folder(place) as scratch:
        (scratch / "a").write_text("new")
        (scratch / "b").write_text("new")
    assert {file.name: file.read_text() for file in place.iterdir()} == {"a": "new", "b": "new"}
    assert list(tmp_path.iterdir()) == [place]


def test_a_folder_does_not_take_the_place_of_anything_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("kept")
    with (
        pytest.raises(FileError, match="contains other files, such"),
        atomic_folder(tmp_path / "run") as scratch,
    ):
        (scratch / "a").write_text("new")
    with pytest.raises(FileError, match="found a file"), atomic_folder(tmp_path / "run" / "mine"):
        pass
    assert {file.name: file.read_text() for file in (tmp_path / "run").iterdir()} == {"mine": "kept"}
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"), atomic_file(tmp_path / "file" / "below") as scratch:
        scratch.write_text("")


def test_an_edit_without_a_subject_is_stored_without_one() -> None:
    assert FactEdit("x", "a", "y").to_dict() == {"x": "x", "a": "a", "y": "y"}
    assert FactEdit(**FactEdit("x", "a", subject="s").to_dict()) == FactEdit("x", "a", subject="s")
