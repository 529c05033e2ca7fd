"""The embedded world: the form of its facts, and that nothing held out leaks into training."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from factpatch import world
from factpatch.facts import normalize

ROOT = Path(__file__).parent.parent
ARTICLES = {"the", "a", "an"}


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - ARTICLES


def test_facts_are_many_and_of_one_form() -> None:
    facts = world.facts()
    assert len(facts) >= 2000
    assert len({fact.id for fact in facts}) == len(facts)
    assert {fact.relation for fact in facts} == set(world.relations())
    for fact in facts:
        assert fact.subject == fact.subject.strip() != ""
        assert fact.answer == fact.answer.strip() != ""
        assert len(fact.answer.split()) <= 6
        assert not any(character in fact.subject + fact.answer for character in "{}\n\t")


def test_wordings() -> None:
    """Ten or more to learn from and two that are kept out, each its relation's own."""
    seen: dict[str, str] = {}
    for name, relation in world.relations().items():
        assert len(relation.wordings) >= 10
        assert len(relation.held_out) == 2
        for wording in (*relation.wordings, *relation.held_out):
            assert wording.count("{}") == 1
            assert wording.endswith("?")
            assert seen.setdefault(normalize(wording), name) == name
        assert len({normalize(w) for w in (*relation.wordings, *relation.held_out)}) >= 12


def test_held_out_wordings_are_other_words() -> None:
    """Not a trained wording in another order, nor with another article or comma."""
    for relation in world.relations().values():
        for held_out in relation.held_out:
            for trained in relation.wordings:
                assert len(words(held_out) ^ words(trained)) >= 2, (held_out, trained)


def test_changes_differ_from_2018() -> None:
    changes = world.changes()
    assert len(changes) >= 25
    assert len({change.fact.id for change in changes}) == len(changes)
    for change in changes:
        assert normalize(change.answer) != normalize(change.fact.answer)
        assert 2018 <= change.year <= 2026
        assert len(change.source.split()) >= 3
    lines = [json.loads(line) for line in (world.PLACE / "changes.jsonl").read_text().splitlines()]
    for line, change in zip(lines, changes, strict=True):
        assert line["before"] == change.fact.answer


def make_world() -> Any:
    spec = importlib.util.spec_from_file_location("make_world", ROOT / "tools" / "make_world.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_held_out_wording_is_trained_on(tmp_path: Path) -> None:
    """Neither the model nor the editor nor the tokenizer sees one, nor a new answer as a fact."""
    make_world().write_data(tmp_path)
    held_out = {normalize(question) for fact in world.facts() for question in fact.held_out}
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [file.name for file in files] == ["edits.jsonl", "train.jsonl", "valid.jsonl"]
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            for text in (record["input"], *record["human_rephrases"]):
                assert normalize(text) not in held_out
