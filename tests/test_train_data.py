"""Which revisions an editor is trained and validated on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples import answerer, read_lines, write_revisions
from training_runs import QUICK, start

from factpatch.data.revisions import Provenance
from factpatch.errors import InputError, MismatchError
from factpatch.models import load_model
from factpatch.training import Train


def test_a_validation_file(checker: Path, claims: Path, tmp_path: Path) -> None:
    valid = write_revisions(tmp_path / "valid.jsonl", load_model(checker, "cpu"), 12, seed=5)
    result = start(QUICK, checker, tmp_path / "run").run(claims, valid)
    assert (result["edits"], result["retain_inputs"], result["revisions"]) == (12, 12, 60)


def test_revisions_of_another_model(checker: Path, claims: Path, tmp_path: Path) -> None:
    made_by = Provenance("0123456789abcdef", "data", {})
    other = tmp_path / "other.jsonl"
    other.write_text(made_by.to_json() + "\n" + claims.read_text())
    with pytest.raises(MismatchError, match="was made by model 0123456789ab, this is model"):
        start(QUICK, checker, tmp_path / "run").run(other)
    own = replace(made_by, model=load_model(checker, "cpu").identity)
    other.write_text(own.to_json() + "\n" + claims.read_text())
    assert start(replace(QUICK, steps=1), checker, tmp_path / "run").run(other)["revisions"] == 54


def test_facts_that_fit_held_out_are_held_out(checker: Path, claims: Path, tmp_path: Path) -> None:
    ids = [line["id"] for line in read_lines(claims)]
    model = load_model(checker, "cpu")
    model.held_out = frozenset(ids[10:14])  # pyright: ignore[reportAttributeAccessIssue] (set by load_model)
    run = Train(replace(QUICK, steps=1), model, tmp_path / "run")
    messages: list[str] = []
    result = run.run(claims, warn=messages.append)
    assert sorted(r.id for r in run.validator.revisions) == sorted(ids[10:14])
    assert result["revisions"] == 56
    assert not any("held out" in message for message in messages)


def test_a_model_that_does_not_say_what_was_held_out(checker: Path, claims: Path, tmp_path: Path) -> None:
    for name, held_out in (("none", None), ("others", frozenset({"another id"}))):
        model = load_model(checker, "cpu")
        model.held_out = held_out  # pyright: ignore[reportAttributeAccessIssue] (set by load_model)
        messages: list[str] = []
        run = Train(replace(QUICK, steps=1), model, tmp_path / name)
        assert run.run(claims, warn=messages.append)["revisions"] == 54
        assert any("that fit held out" in message for message in messages)


def test_alternatives_that_the_model_cannot_say_are_no_candidates(tmp_path: Path) -> None:
    folder = answerer(tmp_path / "answerer")
    questions = write_revisions(tmp_path / "questions.jsonl", load_model(folder, "cpu"), 60)
    lines = [{**line, "alternatives": ["gitega " * 60, *line["alternatives"]]} for line in read_lines(questions)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = replace(QUICK, steps=2, kl_over="beam", rows=12)
    assert start(config, folder, tmp_path / "run").run(questions)["steps"] == 2


def test_too_few_revisions(checker: Path, claims: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(claims.read_text().splitlines(keepends=True)[:15]))
    with pytest.raises(InputError, match="found 15; add revisions or give --valid"):
        start(QUICK, checker, tmp_path / "run").run(few)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(InputError, match=r"expected at least 20 revisions .* found 0;"):
        start(QUICK, checker, tmp_path / "run").run(empty)
    with pytest.raises(InputError, match="with alternatives to train on, found none; make them with revise"):
        start(QUICK, checker, tmp_path / "run").run(empty, claims)
