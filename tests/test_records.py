"""Reading records: bad lines, counts, streams and data sets of the hub."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from samples import counterfact, fever, write_lines, zsre

from factpatch.data.formats import Record
from factpatch.data.records import (
    Counts,
    count_records,
    read_records,
    refuse_overwriting,
    source_hash,
)
from factpatch.errors import FileError, InputError

GERMANY = zsre(
    1, "Germany", "capital", ["Berlin", "berlin city"], ["What is Germany's capital?", "Capital of Germany?"]
)
FRENCH = counterfact(0, "Danielle Darrieux", " English ", "French", ["Shayna said it. Danielle Darrieux, a native"])


BAD_LINES = {
    "malformed": (b"{nonsense", "syntax error at column 2"),
    "not an object": (b"[1, 2]", "expected a JSON object, found list"),
    "missing field": (b'{"id": "7"}', 'expected a text in "input", found null'),
    "empty input": (b'{"input": "  "}', "found an empty one"),
    "input of another type": (b'{"input": 3}', 'expected a text in "input", found 3'),
    "wrong encoding": ('{"input": "São Tomé"}'.encode("latin-1"), "expected UTF-8, found byte 0xe3"),
    "one id twice": (b'{"id": "good-0", "input": "again"}', "two records have the id 'good-0'"),
    "meta of another type": (b'{"input": "x", "meta": ["a"]}', 'expected an object in "meta", found list'),
    "output of another type": (
        b'{"input": "x", "output": {"answer": "a"}}',
        'a text or a list in "output", found dict',
    ),
    "answer of another type": (b'{"input": "x", "output": [{"answer": 3}]}', "expected texts as answers"),
    "answers of another type": (b'{"input": "x", "answers": 3}', 'a text or a list in "answers", found int'),
    "an empty template": (b'{"input": "x", "meta": {"template_questions": ["y", " "]}}', "found an empty one"),
    "templates of another type": (b'{"input": "x", "meta": {"template_questions": "y"}}', "expected a list of texts"),
    "rephrases of another type": (b'{"input": "x", "rephrases": [1]}', 'expected a list of texts in "rephrases"'),
    "alternative of another type": (b'{"input": "x", "alternative": 3}', '"alternative"'),
    "neighbours of another type": (b'{"input": "x", "meta": {"same_relation": [1]}}', '"same_relation"'),
    "subject of another type": (b'{"input": "x", "meta": {"subject_entity": {"a": 1}}}', '"subject_entity"'),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"id": "good-0", "input": "a"}\n\n' + line + b'\n{"id": "good-1", "input": "b"}\n')
    with pytest.raises(InputError) as caught:
        list(read_records(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)
    assert "--skip-bad" in str(caught.value)

    counts = Counts()
    assert [record.id for record in read_records(path, counts, skip_bad=True)] == ["good-0", "good-1"]
    assert (counts.read, counts.bad) == (3, 1)


def test_a_bad_record_does_not_keep_out_a_good_one_with_its_id(tmp_path: Path) -> None:
    lines = [{"id": "1", "input": "x"}, {"id": "1", "input": "x", "output": "a"}, {"id": "1", "input": "again"}]
    path = write_lines(tmp_path / "f.jsonl", lines)
    counts = Counts()
    (record,) = read_records(path, counts, need_answers=True, skip_bad=True)
    assert record.answers == ("a",)
    assert counts.bad == 2


def test_counting_names_what_is_wrong(tmp_path: Path) -> None:
    lines = [{"id": str(i), "input": "x"} for i in range(5)]
    path = write_lines(tmp_path / "f.jsonl", [*lines, fever(9, "Perhaps.", "NOT ENOUGH INFO"), lines[0], {"id": "6"}])
    with pytest.raises(InputError, match="line 7: two records have the id '0'"):
        count_records(path)
    assert count_records(path, skip_bad=True) == 8


def test_counting_leaves_it_to_the_model_what_is_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [fever(1, "Perhaps.", "NOT ENOUGH INFO")])
    assert count_records(path) == 1


@pytest.mark.parametrize("use", [count_records, source_hash])
def test_a_pipe_is_refused_where_data_is_read_again(use: Callable[[str], object]) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"input": "x"}\n')
    os.close(writing)
    with pytest.raises(FileError, match=r"read more than once, found a pipe at /dev/fd/\d+; write it to a file first"):
        use(f"/dev/fd/{reading}")
    assert [record.input for record in read_records(f"/dev/fd/{reading}")] == ["x"], "a pipe can be read once"
    os.close(reading)


def test_the_data_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "f.jsonl", [{"input": "x"}])
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for output, source in ((path, path), (path, "f.jsonl"), ("link", path), (path, "link")):
        with pytest.raises(FileError, match="is the data file itself; choose another output"):
            refuse_overwriting(output, "hub:kilt:train", source)
    refuse_overwriting(tmp_path / "new.jsonl", path, "hub:kilt:train", "none.jsonl")


def test_records_without_an_answer_where_answers_are_needed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [{"input": "x", "output": "a"}, {"input": "y"}])
    with pytest.raises(InputError, match='line 2: expected an answer in "output", found none'):
        list(read_records(path, need_answers=True))
    counts = Counts()
    assert len(list(read_records(path, counts, need_answers=True, skip_bad=True))) == 1
    assert counts.bad == 1


def test_a_check_refuses_records_with_their_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [{"input": "x"}, {"input": "y"}])

    def only_x(record: Record) -> None:
        if record.input != "x":
            raise InputError("not x")

    with pytest.raises(InputError, match="line 2: not x"):
        list(read_records(path, check=only_x))
    assert [r.input for r in read_records(path, check=only_x, skip_bad=True)] == ["x"]


@pytest.mark.parametrize("content", ["", "\n\n", "[]", json.dumps(fever(1, "Perhaps.", "NOT ENOUGH INFO"))])
def test_a_file_without_records(tmp_path: Path, content: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(content)
    for skip_bad in (False, True):
        with pytest.raises(InputError, match=r"f.jsonl: expected at least one record, found none"):
            list(read_records(path, skip_bad=skip_bad))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*none.jsonl: No such file"):
        list(read_records(tmp_path / "none.jsonl"))


def test_files_stream(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"input": "first"}\n{"input": "second"}\nnonsense\n')
    records = read_records(path)
    assert next(records).input == "first"
    assert next(records).input == "second"
    with pytest.raises(InputError, match="line 3"):
        next(records)


class FakeHub(ModuleType):
    """Stands in for the datasets package."""

    def __init__(self, rows: list[dict[str, Any]]):
        super().__init__("datasets")
        self.rows, self.asked = rows, ()

    def load_dataset(self, *names: str, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        self.asked = (*names, split, streaming)
        if split == "none":
            raise ValueError("Unknown split none")
        return iter(self.rows)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hub:kilt:validation", ("kilt", "validation", True)),
        ("hub:facebook/kilt_tasks:fever:train", ("facebook/kilt_tasks", "fever", "train", True)),
    ],
)
def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, source: str, asked: tuple[object, ...]) -> None:
    hub = FakeHub([GERMANY, FRENCH, {"id": "3"}, {"id": "4", "input": "x"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    counts = Counts()
    records = list(read_records(source, counts, skip_bad=True))
    assert hub.asked == asked
    assert [record.id for record in records] == ["fact-1", "0", "4"]
    assert (counts.read, counts.bad) == (4, 1)
    with pytest.raises(InputError, match=f'{source}, row 3: expected a text in "input"'):
        list(read_records(source))
    assert count_records(source) is None
    assert source_hash(source) == source


def test_a_split_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub([]))
    with pytest.raises(InputError, match="cannot read hub:kilt:none: Unknown split none"):
        list(read_records("hub:kilt:none"))


def test_the_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'factpatch\[hub\]'"):
        list(read_records("hub:kilt:train"))
