"""Makes the embedded world's model, editor, scope, merged patch and revision file from its facts: `make world`.

The model and the editor are made by the commands that users run (fit, revise, train), from one seed and in a fixed
number of steps, so that the same machine makes the same files.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from world_data import HELD_OUT, LEARNT, choose_targets, write_data
from world_model import new_model, new_tokenizer
from world_typing import Typist

from factpatch import world
from factpatch.covariance import Covariance
from factpatch.data.holdout import hash_shuffled
from factpatch.data.records import Record
from factpatch.data.revise import revise_records
from factpatch.data.revisions import Provenance, Revision, edit_of
from factpatch.deltas import Dense
from factpatch.demo import outdated, question_of, with_neighbours
from factpatch.editors import Looped, load_editor
from factpatch.errors import FactpatchError, FileError
from factpatch.facts import normalize
from factpatch.files import atomic_file, content_hash
from factpatch.fingerprints import hash_tensors
from factpatch.merging import merge
from factpatch.models import load_model
from factpatch.refining import refine
from factpatch.scope import Scope, ScopeConfig
from factpatch.world import EDITOR, FOLDER, MODEL, REVISIONS, SCOPE, changes, facts

SEED = 0
STAGES = ("fit", "train", "tune", "ship", "scope", "merge", "revisions")
FIT_STEPS, TRAIN_STEPS, TUNE_STEPS = 5000, 12_500, 7000
CONTROLS = 327  # unchanged facts in the revision file
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FIT = ["--lr", "2e-3", "--batch", "256", "--dropout", "0.1", "--checkpoint-seconds", "100000"]
SCOPE_CONFIG = ScopeConfig(compare=False, dimensions=64, paraphrases=6, held_out=700)
MERGE_SAMPLE = 1500  # questions that the merge of all changes is fitted to, before it is refined on all
REFINE_STEPS = 300
TRAIN = {
    "precision": '"fp32"',
    "control_pool": 8000,
    "edits": 32,
    "rows": 8,
    "paraphrases": '"human"',
    "paraphrase_rows": 2,
    "wordings": 1,
    "targets": '["beam"]',
    "others": '["unsure"]',
    "lr": 2e-3,
    "label_smoothing": 0.0,
    "ridge": '"none"',
    "margin": 5e-2,
    "margin_floor": 3e-2,
    "multiplier_lr": 0.1,
    "validations": 15,
    "validation_edits": 64,
    "validation_inputs": 32,
    "checkpoint_seconds": 100000,
    "editor.width": 256,
    "editor.bottleneck": 96,
    "editor.lstm": 64,
}
# Plain updates learn fastest how to make the model say new names. The least-squares form, with similar inputs as
# control inputs, then teaches the editor to leave other facts about the same topic alone.
TUNE = TRAIN | {
    "paraphrase_rows": 1,
    "others": '["uniform", "near"]',
    "lr": 1.5e-3,
    "ridge": 1.0,
    "margin": 3e-2,
    "multiplier_lr": 0.3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/world"), help="a folder for data and runs")
    parser.add_argument("--fit-steps", type=int, default=FIT_STEPS)
    parser.add_argument("--train-steps", type=int, default=TRAIN_STEPS)
    parser.add_argument("--tune-steps", type=int, default=TUNE_STEPS)
    parser.add_argument("--device", default="cpu", help="where the model and the editor are trained")
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    options = parser.parse_args()
    try:
        with locked():
            make(options)
    except Exception as error:
        expected = (FactpatchError, OSError, SafetensorError, subprocess.CalledProcessError)
        if not isinstance(error, expected) and "os error" not in str(error):  # tokenizers raises plain exceptions
            raise
        sys.exit(f"error: {error}")


@contextmanager
def locked() -> Iterator[None]:
    """Makes sure that no other process makes the world at the same time."""
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise FileError(f"another process is making the world in {FOLDER}; wait until it ends") from None
    finally:
        os.close(folder)


def make(options: argparse.Namespace) -> None:
    """Makes one stage, or all of them."""
    start = time.perf_counter()
    for stage in STAGES if options.stage == "all" else [options.stage]:
        {
            "fit": lambda: fit_model(options.work, options.fit_steps, options.device),
            "train": lambda: train_editor(options.work, options.train_steps, options.device),
            "tune": lambda: tune_editor(options.work, options.tune_steps, options.device),
            "ship": lambda: copy_into_package(options.work),
            "scope": train_scope,
            "merge": merge_changes,
            "revisions": write_revisions,
        }[stage]()
        print(f"{stage}: finished after {time.perf_counter() - start:.0f} s", flush=True)


def fit_model(work: Path, steps: int, device: str) -> None:
    """Trains the model, and writes its revisions."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tokenizer = new_tokenizer(SEED)
    new_model(work / "start", tokenizer, SEED)
    write_data(work, tokenizer, SEED)
    given = ["--model", work / "start", "--train", work / "train.jsonl", "--valid", work / "valid.jsonl"]
    run("fit", *given, "--task", "answer", *FIT, "--steps", steps, "--output", work / "fitted", device=device)
    copy_in_half_precision(work / "fitted", work / "model")
    given = ["--model", work / "model", "--data", work / "edits.jsonl"]
    run("revise", *given, "--output", work / "revisions.jsonl", device=device)


def train_editor(work: Path, steps: int, device: str) -> None:
    choose_targets(work, SEED)
    _train(work, work / "editor", TRAIN, "--steps", steps, device=device)


def tune_editor(work: Path, steps: int, device: str) -> None:
    _train(work, work / "tuned", TUNE, "--steps", steps, "--init", work / "editor/editor", device=device)


def _train(work: Path, output: Path, settings: dict[str, Any], *options: object, device: str) -> None:
    shutil.rmtree(output, ignore_errors=True)
    given = ["--model", work / "model", "--train", work / LEARNT, "--valid", work / HELD_OUT]
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    run("train", "--config", "qa", *given, *options, *chosen, "--output", output, device=device)


def copy_into_package(work: Path) -> None:
    """Copies the model and the editor into the package, with weights in half precision."""
    for folder in (MODEL, EDITOR):
        shutil.rmtree(folder, ignore_errors=True)
    copy_in_half_precision(work / "model", MODEL)
    load_editor(work / "tuned/editor").half().save(EDITOR)
    for file in MODEL.iterdir():
        if file.name not in MODEL_FILES:
            file.unlink()
    for weights in (MODEL / "model.safetensors", EDITOR / "editor.safetensors"):
        weights.chmod(0o644)
        print(f"{weights.name}: {hash_tensors(load_file(weights))}")


def train_scope() -> None:
    """Trains the embedded scope on trained wordings and typed questions of all facts, but on no held-out wording."""
    rng, typist = random.Random(SEED), Typist()
    wordings = [[*rng.sample(fact.questions, 4), *typist.questions(fact, 3, rng)] for fact in facts()]
    revisions = [
        Revision(fact.id, question, fact.answer, (), tuple(paraphrases), (), ())
        for fact, (question, *paraphrases) in zip(facts(), wordings, strict=True)
    ]
    scope = Scope.train(load_model("world", "cpu"), revisions, SCOPE_CONFIG)
    held_out = hash_shuffled(revisions, SCOPE_CONFIG.seed)[: SCOPE_CONFIG.held_out]  # as Scope.train chooses them
    scope.calibrate(held_out, facts=len(changes()))
    scope.save(SCOPE)
    print(f"{SCOPE.name}: {scope.calibrated}")


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


def write_revisions() -> None:
    """Writes the embedded model's revision file: all changes as edits, and a sample of other facts to leave alone."""
    model = load_model("world", "cpu")
    changed = {change.fact.id: change.answer for change in changes()}
    rest = [fact for fact in facts() if fact.id not in changed]
    sample = [fact for fact in facts() if fact.id in changed] + random.Random(SEED).sample(rest, CONTROLS)
    records = [
        Record(
            fact.id,
            question_of(fact),
            (fact.answer,),
            tuple(fact.held_out),
            subject=fact.topic,
            alternative=changed.get(fact.id),
        )
        for fact in sample
    ]
    revisions = [
        replace(one, alternatives=one.alternatives[:1])
        if one.id in changed
        else replace(one, alternatives=(), neighbours=())
        for one in with_neighbours(model, revise_records(model, records))
    ]
    settings = {"dtype": str(model.model.dtype).removeprefix("torch.")}
    provenance = Provenance(model.identity, content_hash(FOLDER / "facts.jsonl"), settings)
    lines = "".join(f"{line.to_json()}\n" for line in (provenance, *revisions))
    with atomic_file(REVISIONS) as scratch:
        scratch.write_bytes(gzip.compress(lines.encode(), mtime=0))  # no timestamp, so that the file is reproducible
    print(f"{REVISIONS.name}: {len(revisions)} revisions, {REVISIONS.stat().st_size / 1000:.0f} kB")


def copy_in_half_precision(source: Path, target: Path) -> None:
    """Copies a model's folder, with its weights in half precision."""
    weights = "model.safetensors"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(weights))
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / weights).items()
    }
    save_file(tensors, target / weights, metadata={"format": "pt"})


def run(command: str, *options: object, device: str) -> None:
    arguments = [command, *map(str, options), "--device", device, "--seed", str(SEED)]
    print("factpatch", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "factpatch", *arguments], check=True)


if __name__ == "__main__":
    main()
