"""Splitting facts into train and dev."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from samples import read_lines, write_lines, zsre

from factpatch.data.formats import Record
from factpatch.data.records import read_records
from factpatch.data.split import split_facts, write_split
from factpatch.errors import InputError


def facts(**relations: int) -> list[Record]:
    """Facts with two questions each; the arguments say how many per relation."""
    return [
        Record(f"{relation}-{i}", f"{relation} of {i}?", ("a",), (), (f"{i} has which {relation}?",), f"s{i}", relation)
        for relation, number in relations.items()
        for i in range(number)
    ]


def test_each_relation_gives_the_same_share() -> None:
    split = split_facts(facts(capital=40, river=20, lake=100), 0.1, seed=0)
    assert Counter(r.relation for r in split.dev) == {"capital": 4, "river": 2, "lake": 10}
    assert Counter(r.relation for r in split.train) == {"capital": 36, "river": 18, "lake": 90}


def test_small_relations_contribute_too() -> None:
    """A tenth of three facts is less than one, but 40 such relations together give 12."""
    split = split_facts(facts(**{f"r{i}": 3 for i in range(40)}), 0.1, seed=0)
    assert len(split.dev) == 12
    assert max(Counter(r.relation for r in split.dev).values()) == 1


def test_nothing_is_lost_or_doubled() -> None:
    records = facts(capital=31, river=7)
    split = split_facts(records, 0.3, seed=1)
    assert sorted(r.id for r in split.train + split.dev) == sorted(r.id for r in records)


def test_records_of_one_subject_and_relation_stay_together() -> None:
    records = [
        Record(f"{subject}-{relation}-{i}", f"question {i}", subject=f"s{subject}", relation=relation)
        for i in range(3)
        for subject in range(20)
        for relation in ("capital", "river")
    ]
    split = split_facts(records, 0.25, seed=0)
    sides = [{(r.subject, r.relation) for r in part} for part in (split.train, split.dev)]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [30, 10]
    assert (len(split.train), len(split.dev)) == (90, 30)
    assert {r.subject for r in split.train} & {r.subject for r in split.dev}, "subjects alone do not tie facts"


def test_facts_not_questions_are_split() -> None:
    split = split_facts(facts(capital=10, river=10), 0.2, seed=0)
    questions = [{q for r in part for q in r.questions} for part in (split.train, split.dev)]
    assert not questions[0] & questions[1]
    assert split.counts() == {
        "train_facts": 16,
        "train_questions": 32,
        "train_relations": 2,
        "dev_facts": 4,
        "dev_questions": 8,
        "dev_relations": 2,
    }


def test_the_seed_decides() -> None:
    records = facts(capital=30, river=30)
    first = split_facts(records, 0.2, seed=3)
    assert split_facts(records, 0.2, seed=3) == first
    assert {r.id for r in split_facts(list(reversed(records)), 0.2, seed=3).dev} == {r.id for r in first.dev}
    assert {r.id for r in split_facts(records, 0.2, seed=4).dev} != {r.id for r in first.dev}


def test_records_without_relation_are_split_too() -> None:
    split = split_facts([Record(str(i), f"claim {i}") for i in range(10)], 0.2, seed=0)
    assert (len(split.train), len(split.dev)) == (8, 2)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_too_few_to_split(number: int) -> None:
    with pytest.raises(InputError, match=f"a share of 0.2 leaves {number} facts for train and 0 for dev; add records"):
        split_facts(facts(capital=number), 0.2, seed=0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_a_share_outside_0_to_1(share: float) -> None:
    with pytest.raises(InputError, match="expected a share between 0 and 1"):
        split_facts(facts(capital=10), share, seed=0)


def test_the_parts_are_written_in_kilts_form(tmp_path: Path) -> None:
    lines = [zsre(i, f"S{i}", "capital", ["a", "b"], [f"capital of S{i}?", f"S{i} has capital?"]) for i in range(10)]
    split = split_facts(read_records(write_lines(tmp_path / "all.jsonl", lines)), 0.3, seed=0)
    write_split(split, tmp_path / "train.jsonl", tmp_path / "dev.jsonl")
    assert list(read_records(tmp_path / "dev.jsonl")) == split.dev
    line = read_lines(tmp_path / "dev.jsonl")[0]
    assert line["input"] == line["meta"]["template_questions"][0]
    assert line["meta"]["relation"] == "capital"
    assert [entry["answer"] for entry in line["output"]] == ["a", "b"]


def test_one_file_for_both_parts_is_refused(tmp_path: Path) -> None:
    split = split_facts(facts(capital=10), 0.2, seed=0)
    with pytest.raises(InputError, match=r"--train and --dev are the same file, .*out; choose two"):
        write_split(split, tmp_path / "out", tmp_path / "." / "out")
