"""Data files in the formats that factpatch reads, and small helpers around them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiny

from factpatch.data.records import Counts, read_records
from factpatch.data.revise import revise_records
from factpatch.data.revisions import Provenance, Revision
from factpatch.models import Classifier, TaskModel

WORDS = [word for word in tiny.VOCABULARY if word.isalpha()]
LABELS = ("REFUTES", "SUPPORTS")


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_after_provenance(path: Path) -> list[dict[str, Any]]:
    """The lines of a revision file after its provenance record."""
    first, *lines = read_lines(path)
    assert list(first) == ["provenance"]
    return lines


def texts(count: int, seed: int = 0, shortest: int = 3, longest: int = 9) -> list[str]:
    """Distinct random texts made of the words that the tiny models know."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest)))] = None
    return list(found)


def fever(number: int, claim: str, label: str | None) -> dict[str, Any]:
    """A claim as KILT publishes it; without a label, as in its test set."""
    output = [{"answer": label, "provenance": [{"wikipedia_id": "1", "title": "Paris"}]}, {"provenance": []}]
    return {"id": str(number), "input": claim, "output": output if label else [], "meta": {"partial_evidence": []}}


def claims(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Claims that are labelled true if they mention Paris and false if they mention Gitega."""
    rng = random.Random(seed)
    lines = []
    for i, text in enumerate(texts(count, seed)):
        words = [word for word in text.split() if word not in ("paris", "gitega")]
        word, label = (("gitega", "REFUTES"), ("paris", "SUPPORTS"))[i % 2]
        words.insert(rng.randint(0, len(words)), word)
        lines.append(fever(i, " ".join(words), label))
    return lines


def zsre(number: int, subject: str, relation: str, answers: list[str], questions: list[str]) -> dict[str, Any]:
    """A fact as KILT publishes it for slot filling, with the question's templates in meta."""
    return {
        "id": f"fact-{number}",
        "input": f"{subject} [SEP] {relation}",
        "output": [{"answer": answer, "provenance": [{"wikipedia_id": "11867"}]} for answer in answers],
        "meta": {"template_questions": questions},
    }


def counterfact(case: int, subject: str, new: str, true: str, paraphrases: list[str]) -> dict[str, Any]:
    """A record of CounterFact's published JSON without the fields that are not read."""
    return {
        "case_id": case,
        "pararel_idx": 2796,
        "requested_rewrite": {
            "prompt": "The mother tongue of {} is",
            "relation_id": "P103",
            "target_new": {"str": new, "id": "Q1860"},
            "target_true": {"str": true, "id": "Q150"},
            "subject": subject,
        },
        "paraphrase_prompts": paraphrases,
        "neighborhood_prompts": ["The native language of Montesquieu is"],
    }


def fact_checker(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves a tiny random classifier of claims and returns its folder."""
    names = dict(enumerate(LABELS))
    numbers = {label: i for i, label in names.items()}
    model = tiny.build("bert", seed, **{"num_labels": 2, "id2label": names, "label2id": numbers, **overrides})
    assert isinstance(model, Classifier)
    assert model.labels == list(LABELS)
    model.save(folder)
    return folder


def answerer(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves a tiny random model that answers questions and returns its folder."""
    tiny.build("bart", seed, **overrides).save(folder)
    return folder


def revisions(model: TaskModel, count: int, seed: int = 0) -> list[Revision]:
    """Revisions of random texts as `revise` makes them, each with two generated paraphrases and a human one."""
    lines = [
        {
            "input": text,
            "output": text.split()[0],
            "rephrases": [f"the {text}", f"{text} ?"],
            "human_rephrases": [f"a {text}"],
        }
        for text in texts(count, seed)
    ]
    if isinstance(model, Classifier):
        lines = [{**line, "output": model.labels[len(line["input"]) % len(model.labels)]} for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        records = list(read_records(write_lines(Path(folder) / "records.jsonl", lines), Counts()))
    return revise_records(model, records)


def write_revisions(path: Path, model: TaskModel, count: int, seed: int = 0, provenance: bool = False) -> Path:
    """Writes revisions of random texts, after a provenance record if asked to."""
    first = [Provenance(model.identity, f"{count} random texts of seed {seed}", {})] if provenance else []
    path.write_text("".join(f"{record.to_json()}\n" for record in (*first, *revisions(model, count, seed))))
    return path
