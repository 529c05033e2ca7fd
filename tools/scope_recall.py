"""Measures how many paraphrases a scope recognises, by the cosine alone and with a comparer.

python tools/scope_recall.py --model runs/qa --data zsre/train.jsonl --output runs/scope-recall.json

Part of the facts train the scope, some are active, and the inputs of the others should match none of these. "Same
subject" are questions about the subject of an active fact that ask for another relation; they should match none either.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from factpatch.data.formats import Record
from factpatch.data.holdout import hash_shuffled
from factpatch.data.records import read_records
from factpatch.facts import normalize
from factpatch.models import load_model
from factpatch.scope import Scope, ScopeConfig
from factpatch.scope.features import spread_layers
from factpatch.scope.learning import learn
from factpatch.scope.matching import Matcher

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
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    model = load_model(options.model)
    needed = options.train + options.active + options.others
    records = hash_shuffled(read_records(options.data), options.seed)[:needed]
    active, rest = records[: options.active], records[options.active :]
    trained, others = rest[: options.train], rest[options.train :]
    config = ScopeConfig(steps=options.steps, paraphrases=PARAPHRASES, seed=options.seed)
    layers = spread_layers(model)
    texts = [[r.input, *paraphrases(r, "rephrases"), *paraphrases(r, "human_rephrases")] for r in trained]
    learned = learn(model, [group for group in texts if len(group) > 1], layers, config, lambda stage, share: None)
    scope = Scope(model, layers, learned.mean, learned.scale, learned.projection, learned.matcher)
    print(f"trained after {time.perf_counter() - start:.0f} s")

    scope.index([r.input for r in active])
    questions: dict[str, list[tuple[int | None, str]]] = {
        "generated": [(n, text) for n, r in enumerate(active) for text in paraphrases(r, "rephrases")],
        "human": [(n, text) for n, r in enumerate(active) for text in paraphrases(r, "human_rephrases")],
        "others": [(None, r.input) for r in others],
        "same subject": [(None, text) for text in same_subject(active, others, random.Random(options.seed))],
    }
    readings = {kind: scope.read([text for _, text in rows]) for kind, rows in questions.items()}
    results = []
    for name, matcher in (("cosine", Matcher()), ("comparer", learned.matcher)):
        scope.matcher = matcher
        for share in options.false_matches:
            scope.calibrate_index([text for _, text in questions["others"]], share)
            row: dict[str, float | str] = {"scope": name, "false matches": share}
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
