"""Records in the formats of KILT, CounterFact and users."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from samples import counterfact, fever, write_lines, zsre

from factpatch.data.formats import Record
from factpatch.data.records import (
    FORMATS,
    Counts,
    count_records,
    parse_record,
    read_records,
)
from factpatch.errors import FileError, InputError

GERMANY = zsre(
    1, "Germany", "capital", ["Berlin", "berlin city"], ["What is Germany's capital?", "Capital of Germany?"]
)


FRENCH = counterfact(0, "Danielle Darrieux", " English ", "French", ["Shayna said it. Danielle Darrieux, a native"])


def test_fever_as_published(tmp_path: Path) -> None:
    lines = [
        fever(1, "Paris is in France.", "SUPPORTS"),
        fever(2, "Paris is a person.", "NOT ENOUGH INFO"),
        fever(3, "Paris is in Chad.", "REFUTES"),
        fever(4, "Paris is old.", None),
    ]
    counts = Counts()
    records = list(read_records(write_lines(tmp_path / "fever.jsonl", lines), counts))
    assert records == [
        Record("1", "Paris is in France.", ("SUPPORTS",)),
        Record("3", "Paris is in Chad.", ("REFUTES",)),
        Record("4", "Paris is old."),
    ]
    assert (counts.read, counts.kept, counts.left_out, counts.bad) == (4, 3, 1, 0)
    counts = Counts()
    labels = ["supports", "refutes", "not enough info"]
    assert len(list(read_records(tmp_path / "fever.jsonl", counts, labels=labels))) == 4
    assert counts.left_out == 0


def test_zsre_as_published(tmp_path: Path) -> None:
    (record,) = read_records(write_lines(tmp_path / "zsre.jsonl", [GERMANY]))
    assert record == Record(
        id="fact-1",
        input="What is Germany's capital?",
        answers=("Berlin", "berlin city"),
        human_rephrases=("Capital of Germany?",),
        subject="Germany",
        relation="capital",
    )
    assert record.questions == GERMANY["meta"]["template_questions"]


def test_zsre_whose_input_is_one_of_its_questions(tmp_path: Path) -> None:
    meta = {**GERMANY["meta"], "subject_entity": "Germany", "relation": "capital"}
    line = {**GERMANY, "input": "Capital of Germany?", "meta": meta}
    (record,) = read_records(write_lines(tmp_path / "zsre.jsonl", [line]))
    assert (record.subject, record.relation, record.input) == ("Germany", "capital", "Capital of Germany?")
    assert record.human_rephrases == ("What is Germany's capital?",)
    assert sorted(record.questions) == sorted(meta["template_questions"])


def test_a_subject_and_relation_without_questions_is_bad(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "zsre.jsonl", [GERMANY, {**GERMANY, "id": "2", "meta": {"template_questions": []}}])
    with pytest.raises(InputError, match=r"line 2: .*template_questions"):
        list(read_records(path))


def test_a_pair_of_sentences_is_taken_as_it_is(tmp_path: Path) -> None:
    pair = "Paris is in Chad. [SEP] Paris is the capital of France."
    (record,) = read_records(write_lines(tmp_path / "pairs.jsonl", [{"input": pair, "output": "REFUTES"}]))
    assert (record.input, record.subject, record.relation) == (pair, None, None)
    assert parse_record(record.to_dict(), "none") == record


@pytest.mark.parametrize(
    ("output", "answers"),
    [
        ({}, ()),
        ({"output": None}, ()),
        ({"output": " Paris "}, ("Paris",)),
        ({"output": ["Paris", "Paris", "Lutetia", ""]}, ("Paris", "Lutetia")),
        ({"output": [{"answer": "Paris"}, {"provenance": []}]}, ("Paris",)),
        ({"answers": ["Paris"]}, ("Paris",)),
        ({"output": None, "answers": ["Paris"]}, ("Paris",)),
    ],
)
def test_a_users_own_lines(tmp_path: Path, output: dict[str, Any], answers: tuple[str, ...]) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"input": " Where? ", **output}, {"input": "Who?"}])
    first, second = read_records(path)
    assert (first.input, first.answers) == ("Where?", answers)
    assert first.id != second.id


def test_ids_may_be_numbers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"id": i, "input": f"question {i}"} for i in range(3)])
    assert [record.id for record in read_records(path)] == ["0", "1", "2"]


def test_gzipped_files_are_read_alike(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "f.jsonl", [GERMANY, fever(2, "São Tomé is an island.", "SUPPORTS")])
    zipped = tmp_path / "f.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_records(zipped)) == list(read_records(plain))
    assert count_records(zipped) == count_records(plain) == 2


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"input": "question %d"}\n' % i for i in range(99)))[:-40])
    with pytest.raises(FileError, match=r"cannot read .*f.jsonl.gz"):
        list(read_records(path))


def test_counterfact_as_published(tmp_path: Path) -> None:
    path = tmp_path / "counterfact.json"
    path.write_text(json.dumps([FRENCH, {**FRENCH, "case_id": 1}], indent=1))
    first, second = read_records(path)
    assert first == Record(
        id="0",
        input="The mother tongue of Danielle Darrieux is",
        answers=("French",),
        human_rephrases=("Shayna said it. Danielle Darrieux, a native",),
        subject="Danielle Darrieux",
        relation="P103",
        alternative="English",
        neighbours=("The native language of Montesquieu is",),
    )
    assert second.id == "1"
    assert count_records(path) == 2


@pytest.mark.parametrize(
    "rewrite",
    [
        {},
        None,
        {**FRENCH["requested_rewrite"], "target_new": "English"},
        {**FRENCH["requested_rewrite"], "subject": None},
        {**FRENCH["requested_rewrite"], "prompt": ""},
        {**FRENCH["requested_rewrite"], "target_true": {"str": " "}},
        {**FRENCH["requested_rewrite"], "target_true": [1]},
        [1],
    ],
)
def test_a_damaged_counterfact_record_is_named(tmp_path: Path, rewrite: Any) -> None:
    path = tmp_path / "counterfact.json"
    path.write_text(json.dumps([FRENCH, {**FRENCH, "case_id": 1, "requested_rewrite": rewrite}]))
    reason = r'counterfact.json, record 2: expected a CounterFact record with a text in "requested_rewrite\.\w'
    with pytest.raises(InputError, match=reason):
        list(read_records(path))
    counts = Counts()
    assert len(list(read_records(path, counts, skip_bad=True))) == 1
    assert (counts.read, counts.bad) == (2, 1)


def test_a_counterfact_record_without_its_number_or_with_an_odd_relation(tmp_path: Path) -> None:
    odd = {**FRENCH, "requested_rewrite": {**FRENCH["requested_rewrite"], "relation_id": ["P103"]}}
    for record, reason in ((odd, 'expected a text in "relation_id"'), ({**FRENCH, "case_id": None}, '"case_id"')):
        with pytest.raises(InputError, match=reason):
            list(read_records(write_lines(tmp_path / "f.jsonl", [record])))


SIMPLIFIED = {
    "id": "cf-0",
    "input": "The mother tongue of Danielle Darrieux is",
    "output": [{"answer": "French"}],
    "alternative": "English",
    "human_rephrases": ["Where Danielle Darrieux is from, people speak the language of"],
    "meta": {
        "subject_entity": "Danielle Darrieux",
        "same_relation": "Michel Rocard is a native speaker of",
        "same_relation_answer": "French",
    },
}


def test_counterfact_in_its_simplified_form(tmp_path: Path) -> None:
    (record,) = read_records(write_lines(tmp_path / "counterfact.jsonl", [SIMPLIFIED]))
    assert record == Record(
        id="cf-0",
        input="The mother tongue of Danielle Darrieux is",
        answers=("French",),
        human_rephrases=("Where Danielle Darrieux is from, people speak the language of",),
        subject="Danielle Darrieux",
        alternative="English",
        neighbours=("Michel Rocard is a native speaker of",),
    )
    assert record.to_dict() == SIMPLIFIED


def parse_triple(raw: dict[str, Any], default_id: str) -> Record | None:
    """A toy format: {"triple": [subject, relation, object]}."""
    if "triple" not in raw:
        return None
    subject, relation, answer = raw["triple"]
    return Record(default_id, f"{relation} of {subject}?", (answer,), subject=subject, relation=relation)


def test_a_new_format_is_one_function_and_one_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "f.jsonl", [GERMANY, {"triple": ["France", "capital", "Paris"]}, FRENCH])
    with pytest.raises(InputError, match="line 2"):
        list(read_records(path))
    monkeypatch.setitem(FORMATS, "triple", parse_triple)
    records = list(read_records(path))
    assert [record.input for record in records][:2] == ["What is Germany's capital?", "capital of France?"]
    assert parse_record(records[1].to_dict(), "none") == records[1], "commands write it in KILT's format"
    assert records[2].id == "0"


def test_an_array_after_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "counterfact.json"
    path.write_text("\n \n" + json.dumps([FRENCH], indent=1))
    assert [record.id for record in read_records(path)] == ["0"]


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "counterfact.json"
    path.write_text("\n" + json.dumps([FRENCH], indent=1)[:-20])
    with pytest.raises(InputError, match=r"counterfact.json.*damaged one.*line 23"):
        list(read_records(path))


@pytest.mark.parametrize(
    "line",
    [
        fever(1, "Paris is in France.", "SUPPORTS"),
        fever(1, "Paris is in France.", None),
        GERMANY,
        FRENCH,
        SIMPLIFIED,
        {"id": "1", "input": "x", "rephrases": ["x1"], "human_rephrases": ["x2"], "alternative": "no"},
        {"id": "1", "input": "x", "output": "a", "meta": {"subject_entity": "s", "relation": "r", "more": 1}},
    ],
)
def test_a_written_record_reads_the_same(line: dict[str, Any]) -> None:
    record = parse_record(line, "none")
    written = json.loads(json.dumps(record.to_dict()))
    assert parse_record(written, "none") == record
    assert parse_record(written, "none").to_dict() == written


def test_a_written_record_keeps_what_else_was_in_the_line() -> None:
    line = {**GERMANY, "source": "wiki", "meta": {**GERMANY["meta"], "checked": True}}
    written = parse_record(line, "none").to_dict()
    assert written["source"] == "wiki"
    assert written["meta"]["checked"] is True
    assert written["input"] == "What is Germany's capital?"
