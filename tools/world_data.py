"""What the embedded world's model and editor are trained on: questions as people type them, and names to spell."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from world_names import Names
from world_typing import Typist

from factpatch.facts import same
from factpatch.world import Fact, changes, facts

TYPED = 90  # typed questions per fact, in addition to the wordings of relations.json
MADE_UP = 120_000  # made-up names that the model learns to repeat, in addition to the real ones
LONGEST = 30  # tokens of a made-up name
VALID = 500  # facts that the model is validated with
EDITS_PER_FACT = {True: 8, False: 3}  # in the editor's training: more if facts of the relation have changed
NEW_SUBJECTS = 1500  # edits of questions about subjects that the model has never read of
PARAPHRASES = 8  # per edit in the editor's training, half of them typed
TARGETS = 5  # answers that each edit's fact may be changed to
CHOOSING = 300  # revisions that choose the best editor; the model was trained on their facts too
LEARNT, HELD_OUT = "learnt.jsonl", "held-out.jsonl"  # files of revisions: to train the editor on, and to choose it
NOT_NEW = ("world_record", "element_by_number", "country_by_iso_code", "member_count")  # subjects are not names


def write_data(work: Path, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Writes what the model is trained on, a sample to validate it with, and the edits to train the editor on."""
    rng = random.Random(seed)
    typist, names = Typist(), Names()
    asked = (record(fact, [*fact.questions, *typist.questions(fact, TYPED, rng)]) for fact in facts())
    write_lines(work / "train.jsonl", [*asked, *spelling_exercises(names, tokenizer, rng)])
    unseen = [record(fact, typist.questions(fact, 1, rng, held_out=True)) for fact in rng.sample(facts(), VALID)]
    write_lines(work / "valid.jsonl", unseen)
    write_lines(work / "edits.jsonl", edits(typist, names, rng))


def spelling_exercises(
    names: Names, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Makes names to repeat and complete, because an edit can only teach an answer that the model can spell."""
    made_up = list(dict.fromkeys(names.made_up(rng) for _ in range(MADE_UP)))
    lengths = [len(ids) for ids in tokenizer(made_up)["input_ids"]]
    made_up = [name for name, length in zip(made_up, lengths, strict=True) if length <= LONGEST]
    asked = [(f"Repeat: {name}", name) for name in (*names.known, *names.common, *made_up)]
    for name in names.known:
        first, *_, last = name.split() if " " in name else ("",) * 2
        if first:
            asked += [(f"Which name begins with {first}?", name), (f"Which name ends with {last}?", name)]
    return ({"id": f"name/{i}", "input": x, "output": y} for i, (x, y) in enumerate(asked))


def edits(typist: Typist, names: Names, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Makes the questions whose answers the editor learns to change, with paraphrases; half of all are typed."""
    changing = {change.fact.relation for change in changes()}
    for fact in facts():
        for number in range(EDITS_PER_FACT[fact.relation in changing]):
            yield {**record(fact, _wordings(fact, typist, rng)), "id": f"{fact.id}/{number}"}
    nameable = [fact for fact in facts() if fact.relation not in NOT_NEW]
    for number, fact in enumerate(rng.choices(nameable, k=NEW_SUBJECTS)):
        name = names.made_up(rng)
        office = f"{fact.subject.split(' of ')[0]} of {name}"
        new = replace(fact, subject=office if fact.relation == "office_holder" else name)
        yield {**record(new, _wordings(new, typist, rng)), "id": f"new/{number}"}


def _wordings(fact: Fact, typist: Typist, rng: random.Random) -> list[str]:
    """Returns an input and its paraphrases in random order."""
    formal = rng.sample(fact.questions, (1 + PARAPHRASES) // 2)
    wordings = [*formal, *typist.questions(fact, 1 + PARAPHRASES - len(formal), rng)]
    return rng.sample(wordings, len(wordings))


def choose_targets(work: Path, seed: int) -> None:
    """Gives each revision the answers to change it to, and splits the file into training and held-out revisions.

    The answers are other subjects' answers, other names, made-up names and the model's own second choice; but never
    what a fact has changed to.
    """
    rng = random.Random(seed)
    names = Names()
    known = {fact.id: fact for fact in facts()}
    provenance, *lines = (work / "revisions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for raw in map(json.loads, lines):
        fact = known.get(raw["id"].rpartition("/")[0])
        drawn = names.targets(fact or rng.choice(facts()), TARGETS, rng)
        never = [raw["prediction"], *raw["answers"], names.now.get(fact.id, "") if fact else ""]
        wanted = [*drawn, *raw["alternatives"][:1]]
        kept = [text for text in wanted if not any(same(text, other) for other in never)]
        rows.append(json.dumps({**raw, "alternatives": list(dict.fromkeys(kept))}, ensure_ascii=False))
    order = np.random.default_rng([seed, 4]).permutation(len(rows))
    for name, numbers in ((LEARNT, order[CHOOSING:]), (HELD_OUT, order[:CHOOSING])):
        (work / name).write_text(
            "\n".join([provenance, *(rows[number] for number in numbers)]) + "\n", encoding="utf-8"
        )


def record(fact: Fact, questions: Sequence[str]) -> dict[str, Any]:
    office = fact.subject.removesuffix(fact.topic) if fact.relation == "office_holder" else ""
    about = {"subject_entity": fact.topic, "relation": f"{fact.relation} {office}".strip()}
    return {
        "id": fact.id,
        "input": questions[0],
        "output": fact.answer,
        "human_rephrases": list(questions[1:]),
        "meta": about,
    }


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
