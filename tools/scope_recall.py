"""Measures how many paraphrases a scope recognises, by the cosine alone and with a comparer.

python tools/scope_recall.py --model runs/qa --data zsre/train.jsonl --output runs/scope-recall.json

Part of the facts train the scope, some are active, and the inputs of the others should match none of these. Questions
about the subject of an active fact that ask for another relation should match none either. "Same subject" are such
questions from the data, "made up" are questions of other facts with the subject replaced. The threshold is chosen on
the other inputs alone, and then on other inputs of which a tenth are made up (and not among those measured).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from itertools import product
from pathlib import Path

from factpatch.data.formats import Record
from factpatch.data.holdout import hash_shuffled
from factpatch.data.records import read_records
from factpatch.facts import normalize
from factpatch.models import load_model
from factpatch.scope import Scope, ScopeConfig
from factpatch.scope.features import spread_layers
from factpatch.scope.learning import learn
from factpatch.scope.matching import Calibration, Matcher, threshold_for
from factpatch.scope.same_subject import made_up_questions
from factpatch.scope.scope import SAME_SUBJECT_INPUTS

PARAPHRASES = 3  # per fact, of each kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=4000, help="number of facts to train the scope on")
    parser.add_argument("--active", type=int, default=1024, help="number of active facts")
    parser.add_argument("--others", type=int, default=4000, help="number of other inputs")
    parser.add_argument("--false-matches", type=float, nargs="+", default=[0.002, 0.005, 0.01])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--same-subject", type=float, default=0.5, help="made-up questions to train on, per fact")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    model = load_model(options.model)
    needed = options.train + options.active + options.others
    records, partners = apart(hash_shuffled(read_records(options.data), options.seed))
    active, rest = records[: options.active], records[options.active : needed]
    trained, others = rest[: options.train], rest[options.train :]
    config = ScopeConfig(
        steps=options.steps, paraphrases=PARAPHRASES, same_subject=options.same_subject, seed=options.seed
    )
    layers = spread_layers(model)
    texts = [[r.input, *paraphrases(r, "rephrases"), *paraphrases(r, "human_rephrases")] for r in trained]
    texts += made_up_questions(trained, texts, round(config.same_subject * len(texts)), config.seed)
    learned = learn(model, [group for group in texts if len(group) > 1], layers, config, lambda stage, share: None)
    scope = Scope(model, layers, learned.mean, learned.scale, learned.projection, learned.matcher)
    print(f"trained after {time.perf_counter() - start:.0f} s")

    scope.index([r.input for r in active])
    made_up = same_subject(active, others, random.Random(options.seed))
    questions: dict[str, list[tuple[int | None, str]]] = {
        "generated": [(n, text) for n, r in enumerate(active) for text in paraphrases(r, "rephrases")],
        "human": [(n, text) for n, r in enumerate(active) for text in paraphrases(r, "human_rephrases")],
        "others": [(None, r.input) for r in others],
        "same subject": [(None, r.input) for r in partners],
        "made up": [(None, text) for text in made_up],
    }
    readings = {kind: scope.read([text for _, text in rows]) for kind, rows in questions.items()}
    tenth = round(len(others) * SAME_SUBJECT_INPUTS / (1 - SAME_SUBJECT_INPUTS))
    more_made_up = [q for q in same_subject(active, others, random.Random(options.seed + 1)) if q not in made_up]
    mixed = scope.read([*(r.input for r in others), *more_made_up[:tenth]])
    samples = {"others": mixed.part(slice(len(others))), "mixed": mixed}
    results = []
    for name, matcher in (("cosine", Matcher()), ("comparer", learned.matcher)):
        scope.matcher = matcher
        scores = {sample: matcher.best(reading, scope.anchors)[0] for sample, reading in samples.items()}
        for sample, share in product(samples, options.false_matches):
            scope.calibration = Calibration(threshold_for(scores[sample], share), None, share, len(active))
            row: dict[str, float | str] = {"scope": name, "calibrated on": sample, "false matches": share}
            for kind, rows in questions.items():
                found = scope.match_reading([text for _, text in rows], readings[kind])
                if kind in ("generated", "human"):
                    row[kind] = sum(n == own for n, (own, _) in zip(found, rows, strict=True)) / max(1, len(rows))
                else:
                    row[kind] = sum(n is not None for n in found) / max(1, len(rows))
            results.append(row)
            print(row, flush=True)
    counts = {kind: len(rows) for kind, rows in questions.items()}
    outcome = {"options": vars(options) | {"output": str(options.output)}, "texts": counts, "results": results}
    options.output.write_text(json.dumps(outcome, indent=1))
    print(counts, f"{time.perf_counter() - start:.0f} s")


def paraphrases(record: Record, kind: str) -> list[str]:
    """Returns the first paraphrases of a kind that differ from the input by more than case or punctuation."""
    texts = getattr(record, kind)
    return [text for text in texts if normalize(text) != normalize(record.input)][:PARAPHRASES]


def apart(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Keeps one fact of each subject, first those of subjects with two, and returns the second facts separately."""
    by_subject: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_subject[record.subject or record.id].append(record)
    others = [[r for r in group if r.relation != group[0].relation][:1] for group in by_subject.values()]
    order = sorted(zip(by_subject.values(), others, strict=True), key=lambda pair: not pair[1])  # stable
    return [group[0] for group, _ in order], [record for _, second in order for record in second]


def same_subject(active: list[Record], others: list[Record], rng: random.Random) -> list[str]:
    """Asks about each active fact's subject what another fact's question asks about its own."""
    templates = [(r.relation, r.input, r.subject) for r in others if r.subject and r.subject in r.input]
    questions = []
    for record in active if templates else []:
        relation, question, subject = rng.choice(templates)
        if record.subject and subject and relation != record.relation:
            questions.append(question.replace(subject, record.subject))
    return questions


if __name__ == "__main__":
    main()
