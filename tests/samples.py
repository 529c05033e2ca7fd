"""Data files in the forms that factpatch reads, and small helpers around them."""

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
from factpatch.data.revisions import Revision
from factpatch.models import Classifier, TaskModel

WORDS = [word for word in tiny.VOCABULARY if word.isalpha()]
LABELS = ("REFUTES", "SUPPORTS")


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(count: int, seed: int = 0, shortest: int = 3, longest: int = 9) -> list[str]:
    """Different texts of the tiny models' words."""
    chance = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(chance.choices(WORDS, k=chance.randint(shortest, longest)))] = None
    return list(found)


def fever(number: int, claim: str, label: str | None) -> dict[str, Any]:
    """A claim as KILT publishes it; the test set has no labels."""
    output = [{"answer": label, "provenance": [{"wikipedia_id": "1", "title": "Paris"}]}, {"provenance": []}]
    return {"id": str(number), "input": claim, "output": output if label else [], "meta": {"partial_evidence": []}}


def claims(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """True where they speak of Paris, false where of Gitega."""
    chance = random.Random(seed)
    lines = []
    for i, text in enumerate(texts(count, seed)):
        words = [word for word in text.split() if word not in ("paris", "gitega")]
        word, label = (("gitega", "REFUTES"), ("paris", "SUPPORTS"))[i % 2]
        words.insert(chance.randint(0, len(words)), word)
        lines.append(fever(i, " ".join(words), label))
    return lines


def zsre(number: int, subject: str, relation: str, answers: list[str], questions: list[str]) -> dict[str, Any]:
    """A fact as KILT publishes it for slot filling: the question's templates stand in meta."""
    return {
        "id": f"fact-{number}",
        "input": f"{subject} [SEP] {relation}",
        "output": [{"answer": answer, "provenance": [{"wikipedia_id": "11867"}]} for answer in answers],
        "meta": {"template_questions": questions},
    }


def counterfact(case: int, subject: str, new: str, true: str, paraphrases: list[str]) -> dict[str, Any]:
    """A record of CounterFact's published JSON, less what is not read."""
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
    """The folder of a tiny random classifier of claims."""
    names = dict(enumerate(LABELS))
    numbers = {label: i for i, label in names.items()}
    model = tiny.build("bert", seed, **{"num_labels": 2, "id2label": names, "label2id": numbers, **overrides})
    assert isinstance(model, Classifier)
    assert model.labels == list(LABELS)
    model.save(folder)
    return folder


def answerer(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """The folder of a tiny random model that answers questions."""
    tiny.build("bart", seed, **overrides).save(folder)
    return folder


def revisions(model: TaskModel, count: int, seed: int = 0) -> list[Revision]:
    """As `revise` makes them, of random texts with two generated paraphrases and a human one each."""
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


def write_revisions(path: Path, model: TaskModel, count: int, seed: int = 0) -> Path:
    path.write_text("".join(revision.to_json() + "\n" for revision in revisions(model, count, seed)))
    return path
