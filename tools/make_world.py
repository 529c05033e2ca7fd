"""Makes the embedded world's model, editor, scope and revision file from its facts: `make world`.

The model and the editor are made by the commands that users run (fit, revise, train), from one seed and in a fixed
number of steps, so that the same machine makes the same files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from factpatch import world
from factpatch.covariance import Covariance
from factpatch.data.holdout import hash_shuffled
from factpatch.data.records import Record
from factpatch.data.revise import revise_records
from factpatch.data.revisions import Provenance, Revision, edit_of
from factpatch.deltas import Dense
from factpatch.demo import outdated, question_of
from factpatch.editors import Looped, load_editor
from factpatch.facts import normalize
from factpatch.files import content_hash
from factpatch.merging import merge
from factpatch.models import load_model
from factpatch.patch import hash_tensors
from factpatch.refining import refine
from factpatch.scope import Scope, ScopeConfig
from factpatch.world import EDITOR, FOLDER, MODEL, REVISIONS, SCOPE, Fact, changes, facts

SEED = 0
VOCABULARY = 8000  # exceeds the number of words, so that each word, also of new names, is one token
MADE_UP = 12_000  # made-up names that the model learns to repeat, in addition to the real ones
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # tokens 0 to 3
WORDINGS_PER_FACT = {True: 8, False: 2}  # in the editor's training: more if facts of the relation have changed
PARAPHRASES = 6  # per edit in the editor's training
NEW_ANSWERS = {"alike": 3, "known": 4, "made up": 3}  # kinds of target answers in the editor's training, with weights
WORDS = {1: 3, 2: 5, 3: 2}  # number of words in made-up names, with weights
SPLICED = 0.15  # share of made-up names that contain a made-up word
WEIGHT_OF_NAMES = 40  # copies of each name in the text that the vocabulary is built from
CONTROLS = 327  # unchanged facts in the revision file
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FIT = ["--lr", "2e-3", "--batch", "256", "--dropout", "0.1", "--checkpoint-seconds", "100000"]
SCOPE_CONFIG = ScopeConfig(dimensions=64, paraphrases=6, held_out=700)
MERGE_SAMPLE = 1500  # questions that the merge of all changes is fitted to, before it is refined on all
REFINE_STEPS = 100
HELD_OUT = 300  # revisions that choose the best editor; the model was trained on their facts too
TRAIN = {
    "edits": 32,
    "rows": 8,
    "paraphrases": '"human"',
    "paraphrase_rows": 1,
    "lr": 2e-3,
    "label_smoothing": 0.0,
    "margin": 5e-2,
    "margin_floor": 3e-2,
    "multiplier_lr": 0.1,
    "validations": 30,
    "validation_edits": 64,
    "validation_inputs": 32,
    "checkpoint_seconds": 100000,
    "editor.width": 256,
    "editor.bottleneck": 96,
    "editor.lstm": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/world"), help="a folder for data and runs")
    parser.add_argument("--fit-steps", type=int, default=2200)
    parser.add_argument("--train-steps", type=int, default=2800)
    parser.add_argument("--stage", choices=["all", "fit", "train", "scope", "merge", "revisions"], default="all")
    options = parser.parse_args()
    work: Path = options.work
    start = time.perf_counter()
    if options.stage in ("all", "fit"):
        fit_model(work, options.fit_steps)
    if options.stage in ("all", "train"):
        train_editor(work, options.train_steps)
        ship(work)
    if options.stage in ("all", "train", "scope"):
        train_scope()
    if options.stage in ("all", "train", "merge"):
        merge_changes()
    if options.stage in ("all", "train", "revisions"):
        write_revisions()
    print(f"finished in {time.perf_counter() - start:.0f} s")


def merge_changes() -> None:
    """Puts all changes into one patch. The world's spare facts are left out, so that they can measure it."""
    model = load_model("world", "cpu")
    spare = {fact.id for fact in world.spare()}
    rng = random.Random(SEED)
    others = [q for fact in facts() if fact.id not in spare for q in rng.sample(fact.questions, 2)]
    edits = [edit_of(revision) for revision in outdated(model)]
    asked = {normalize(q) for change in changes() for q in change.fact.questions}
    others = [question for question in others if normalize(question) not in asked]
    covariance = Covariance.compute(model, others[:MERGE_SAMPLE])
    patches = Looped(load_editor("world")).propose(model, edits)
    patch = refine(model, merge(model, patches, covariance=covariance, mode="sequence"), others, REFINE_STEPS)
    half = {name: Dense(delta.dense().half()) for name, delta in patch.deltas.items()}
    replace(patch, deltas=half).save(world.MERGED)
    print(f"{world.MERGED.name}: {len(edits)} facts")


def fit_model(work: Path, steps: int) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_data(work)
    new_model(work / "start")
    given = ["--model", work / "start", "--train", work / "train.jsonl", "--valid", work / "valid.jsonl"]
    run("fit", *given, "--task", "answer", *FIT, "--steps", steps, "--output", work / "fitted")
    in_half(work / "fitted", work / "model", "model.safetensors")
    run("revise", "--model", work / "model", "--data", work / "edits.jsonl", "--output", work / "revisions.jsonl")


def train_editor(work: Path, steps: int) -> None:
    shutil.rmtree(work / "editor", ignore_errors=True)
    settings = [part for key, value in TRAIN.items() for part in ("--set", f"{key}={value}")]
    train, held_out = hold_out(work)
    given = ["--model", work / "model", "--train", train, "--valid", held_out, "--steps", steps]
    run("train", "--config", "qa", *given, *settings, "--output", work / "editor")


def ship(work: Path) -> None:
    """Copies the model and the editor into the package, with weights in half precision."""
    for source, folder, name in (
        (work / "model", MODEL, "model.safetensors"),
        (work / "editor/editor", EDITOR, "editor.safetensors"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        in_half(source, folder, name)
        print(f"{name}: {hash_tensors(load_file(folder / name))}")
    for file in MODEL.iterdir():
        if file.name not in MODEL_FILES:
            file.unlink()


def train_scope() -> None:
    """Trains the embedded scope on the trained wordings of all facts; the held-out wordings stay unseen."""
    rng = random.Random(SEED)
    wordings = [rng.sample(fact.questions, 1 + PARAPHRASES) for fact in facts()]
    revisions = [
        Revision(fact.id, question, fact.answer, (), tuple(paraphrases), (), ())
        for fact, (question, *paraphrases) in zip(facts(), wordings, strict=True)
    ]
    scope = Scope.train(load_model("world", "cpu"), revisions, SCOPE_CONFIG)
    held_out = hash_shuffled(revisions, SCOPE_CONFIG.seed)[: SCOPE_CONFIG.held_out]  # as Scope.train chooses them
    scope.calibrate(held_out, facts=len(changes()))
    scope.save(SCOPE)
    print(f"{SCOPE.name}: {scope.calibrated}")


def write_revisions() -> None:
    """Writes the embedded model's revision file: all changes as edits, and a sample of other facts to leave alone."""
    model = load_model("world", "cpu")
    changed = {change.fact.id: change.answer for change in changes()}
    rest = [fact for fact in facts() if fact.id not in changed]
    sample = [fact for fact in facts() if fact.id in changed] + random.Random(SEED).sample(rest, CONTROLS)
    records = [
        Record(fact.id, question_of(fact), (fact.answer,), tuple(fact.held_out), alternative=changed.get(fact.id))
        for fact in sample
    ]
    revisions = [
        replace(revision, alternatives=revision.alternatives[:1] if revision.id in changed else ())
        for revision in revise_records(model, records)
    ]
    settings = {"dtype": str(model.model.dtype).removeprefix("torch.")}
    provenance = Provenance(model.identity, content_hash(FOLDER / "facts.jsonl"), settings)
    lines = "".join(f"{line.to_json()}\n" for line in (provenance, *revisions))
    REVISIONS.write_bytes(gzip.compress(lines.encode(), mtime=0))  # no timestamp, so that the file is reproducible
    print(f"{REVISIONS.name}: {len(revisions)} revisions, {REVISIONS.stat().st_size / 1000:.0f} kB")


def write_data(work: Path) -> None:
    """Writes what the model is trained on, a sample to validate it with, and the edits to train the editor on."""
    rng = random.Random(SEED)
    known = facts()
    names = Names()
    write_lines(work / "train.jsonl", [*(record(fact, fact.questions) for fact in known), *names.exercises(rng)])
    sample = rng.sample(known, 300)
    write_lines(work / "valid.jsonl", (record(fact, [rng.choice(fact.questions)]) for fact in sample))
    changing = {change.fact.relation for change in changes()}
    lines = []
    for fact in known:
        for number in rng.sample(range(len(fact.questions)), WORDINGS_PER_FACT[fact.relation in changing]):
            rest = fact.questions[:number] + fact.questions[number + 1 :]
            questions = [fact.questions[number], *rng.sample(rest, PARAPHRASES)]
            line = {"id": f"{fact.id}/{number}", "alternative": names.other_answer(fact, rng)}
            lines.append({**record(fact, questions), **line})
    write_lines(work / "edits.jsonl", lines)


def hold_out(work: Path) -> tuple[Path, Path]:
    """Splits the revisions into those to train on and those to validate with, the same way every time."""
    provenance, *lines = (work / "revisions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    order = np.random.default_rng([SEED, 4]).permutation(len(lines))
    train, held_out = work / "learnt.jsonl", work / "held-out.jsonl"
    for path, numbers in ((train, order[HELD_OUT:]), (held_out, order[:HELD_OUT])):
        path.write_text("".join([provenance, *(lines[number] for number in numbers)]), encoding="utf-8")
    return train, held_out


class Names:
    """All names that may be an answer: those of 2018, those of today, and names made up of their words.

    The model learns to spell today's names, as a larger model has read people's names before they take office.
    Neither the model nor the editor learns which questions these names answer.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = defaultdict(list)
        for fact in facts():
            self.of[fact.relation].append(fact.answer)
        self.now = {change.fact.id: change.answer for change in changes()}
        self.known = list(dict.fromkeys([*(fact.answer for fact in facts()), *self.now.values()]))
        self.words = list(dict.fromkeys(word for name in self.known for word in name.split()))

    def exercises(self, rng: random.Random) -> list[dict[str, Any]]:
        """Makes names to repeat and complete, because an edit can only teach an answer that the model can spell."""
        asked = [(f"Repeat: {name}", name) for name in (*self.known, *(self.made_up(rng) for _ in range(MADE_UP)))]
        for name in self.known:
            first, *_, last = name.split() if " " in name else ("",) * 2
            if first:
                asked += [(f"Which name begins with {first}?", name), (f"Which name ends with {last}?", name)]
        return [{"id": f"name/{i}", "input": x, "output": y} for i, (x, y) in enumerate(asked)]

    def made_up(self, rng: random.Random) -> str:
        """Joins words drawn from all names; sometimes the first is spliced from the halves of two words."""
        (count,) = rng.choices(list(WORDS), list(WORDS.values()))
        words = [rng.choice(self.words) for _ in range(count)]
        if rng.random() < SPLICED:
            other = rng.choice(self.words)
            words[0] = words[0][: max(1, len(words[0]) // 2)] + other[len(other) // 2 :]
        return " ".join(words)

    def other_answer(self, fact: Fact, rng: random.Random) -> str:
        """Draws another subject's answer, any other name or a made-up one; never what the fact has changed to."""
        others = [answer for answer in self.of[fact.relation] if answer != fact.answer]
        while True:
            (kind,) = rng.choices(list(NEW_ANSWERS), list(NEW_ANSWERS.values()))
            answer = self.made_up(rng) if kind == "made up" else rng.choice(others if kind == "alike" else self.known)
            if answer not in (fact.answer, self.now.get(fact.id)):
                return answer


def record(fact: Fact, questions: list[str]) -> dict[str, Any]:
    return {"id": fact.id, "input": questions[0], "output": fact.answer, "human_rephrases": questions[1:]}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def new_model(folder: Path) -> None:
    """Saves a small BART with random weights and a tokenizer that can spell any text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend(" ")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r" ?[^\s?,']+|."), "isolated"),  # Ramos-Horta and Jr. are single words
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt = [text for fact in facts() for text in (*fact.questions, fact.answer)]
    tokenizer.train_from_iterator([*learnt, *WEIGHT_OF_NAMES * Names().known], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64,
    ).save_pretrained(folder)
    torch.manual_seed(SEED)
    config = BartConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=64,
        init_std=0.08,  # a model this small learns far faster from larger weights than BART's 0.02
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
    )
    BartForConditionalGeneration(config).save_pretrained(folder)


def in_half(source: Path, target: Path, weights: str) -> None:
    """Copies a folder, with its weights in half precision."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(weights))
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / weights).items()
    }
    save_file(tensors, target / weights, metadata={"format": "pt"})
    (target / weights).chmod(0o644)


def run(command: str, *options: object) -> None:
    arguments = [command, *map(str, options), "--device", "cpu", "--seed", str(SEED)]
    print("factpatch", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "factpatch", *arguments], check=True)


if __name__ == "__main__":
    main()
