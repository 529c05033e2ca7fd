"""Makes the embedded world's model and editor from its facts: `make world`.

Everything is done by the commands that users run (fit, revise, train), from one seed and in a fixed number of steps, so
that the same machine makes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from factpatch.patch import hash_tensors
from factpatch.world import EDITOR, MODEL, Fact, changes, facts

SEED = 0
VOCABULARY = 8000  # more than there are words: each is one token, those of new names too
MADE_UP = 12_000  # names to repeat, besides the real ones
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # 0 to 3
WORDINGS_A_FACT = {True: 8, False: 2}  # in which a fact is edited in training: more where facts of its kind change
PARAPHRASES = 6  # of each edit in training
NEW_ANSWERS = {"alike": 3, "known": 4, "made up": 3}  # what facts are edited to in training, and how often
WORDS = {1: 3, 2: 5, 3: 2}  # of made-up names: how many, and how often
SPLICED = 0.15  # of made-up names, with a word that is no word
WEIGHT_OF_NAMES = 40  # of a name against a question, when the vocabulary is made
FIT = ["--lr", "2e-3", "--batch", "256", "--dropout", "0.1", "--checkpoint-seconds", "100000"]
HELD_OUT = 300  # revisions that choose the editor; their facts the model knows as it knows all others
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
    parser.add_argument("--work", type=Path, default=Path("runs/world"), help="where to work")
    parser.add_argument("--fit-steps", type=int, default=2200)
    parser.add_argument("--train-steps", type=int, default=2800)
    parser.add_argument("--stage", choices=["all", "fit", "train"], default="all")
    options = parser.parse_args()
    work: Path = options.work
    start = time.perf_counter()
    if options.stage in ("all", "fit"):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_data(work)
        new_model(work / "start")
        given = ["--model", work / "start", "--train", work / "train.jsonl", "--valid", work / "valid.jsonl"]
        run("fit", *given, "--task", "answer", *FIT, "--steps", options.fit_steps, "--output", work / "fitted")
        in_half(work / "fitted", work / "model", "model.safetensors")
        run("revise", "--model", work / "model", "--data", work / "edits.jsonl", "--output", work / "revisions.jsonl")
        if options.stage == "fit":
            return
    if options.stage in ("all", "train"):
        shutil.rmtree(work / "editor", ignore_errors=True)
        settings = [part for key, value in TRAIN.items() for part in ("--set", f"{key}={value}")]
        rest, held_out = hold_out(work)
        given = ["--model", work / "model", "--train", rest, "--valid", held_out, "--steps", options.train_steps]
        run("train", "--config", "qa", *given, *settings, "--output", work / "editor")
    for source, place, name in (
        (work / "model", MODEL, "model.safetensors"),
        (work / "editor/editor", EDITOR, "editor.safetensors"),
    ):
        shutil.rmtree(place, ignore_errors=True)
        in_half(source, place, name)
        print(f"{name}: {hash_tensors(load_file(place / name))}")
    for left_over in ("fit.json", "metrics.jsonl"):
        (MODEL / left_over).unlink(missing_ok=True)
    size = sum(file.stat().st_size for place in (MODEL, EDITOR) for file in place.iterdir())
    print(f"made in {time.perf_counter() - start:.0f} s, {size / 2**20:.1f} MB")


def write_data(work: Path) -> None:
    """What the model learns, a sample that watches it learn, and what the editor learns to edit."""
    chance = random.Random(SEED)
    known = facts()
    names = Names()
    write_lines(work / "train.jsonl", [*(record(fact, fact.questions) for fact in known), *names.exercises(chance)])
    sample = chance.sample(known, 300)
    write_lines(work / "valid.jsonl", (record(fact, [chance.choice(fact.questions)]) for fact in sample))
    changing = {change.fact.relation for change in changes()}
    lines = []
    for fact in known:
        for number in chance.sample(range(len(fact.questions)), WORDINGS_A_FACT[fact.relation in changing]):
            rest = fact.questions[:number] + fact.questions[number + 1 :]
            questions = [fact.questions[number], *chance.sample(rest, PARAPHRASES)]
            line = {"id": f"{fact.id}/{number}", "alternative": names.other_answer(fact, chance)}
            lines.append({**record(fact, questions), **line})
    write_lines(work / "edits.jsonl", lines)


def hold_out(work: Path) -> tuple[Path, Path]:
    """The revisions to train on, and those that choose: drawn as when what ships was made, for the same editor."""
    lines = (work / "revisions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    order = np.random.default_rng([SEED, 4]).permutation(len(lines))
    parts = {work / "learnt.jsonl": order[HELD_OUT:], work / "held-out.jsonl": order[:HELD_OUT]}
    for path, numbers in parts.items():
        path.write_text("".join(lines[number] for number in numbers), encoding="utf-8")
    rest, held_out = parts
    return rest, held_out


class Names:
    """All that may be an answer one day: answers of 2018, of today, and names made up of their words.

    The model reads today's names as any model reads the names of people who are in no office yet. That they are the
    answer to a question it is never told, and neither is the editor.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = defaultdict(list)
        for fact in facts():
            self.of[fact.relation].append(fact.answer)
        self.now = {change.fact.id: change.answer for change in changes()}
        self.known = list(dict.fromkeys([*(fact.answer for fact in facts()), *self.now.values()]))
        self.words = list(dict.fromkeys(word for name in self.known for word in name.split()))

    def exercises(self, chance: random.Random) -> list[dict[str, Any]]:
        """Names to repeat, and to complete: a model can only be taught to say what it can say."""
        asked = [(f"Repeat: {name}", name) for name in (*self.known, *(self.made_up(chance) for _ in range(MADE_UP)))]
        for name in self.known:
            first, *_, last = name.split() if " " in name else ("",) * 2
            if first:
                asked += [(f"Which name begins with {first}?", name), (f"Which name ends with {last}?", name)]
        return [{"id": f"name/{i}", "input": x, "output": y} for i, (x, y) in enumerate(asked)]

    def made_up(self, chance: random.Random) -> str:
        """Words drawn from all names; now and then one is made of two words' halves."""
        (count,) = chance.choices(list(WORDS), list(WORDS.values()))
        words = [chance.choice(self.words) for _ in range(count)]
        if chance.random() < SPLICED:
            other = chance.choice(self.words)
            words[0] = words[0][: max(1, len(words[0]) // 2)] + other[len(other) // 2 :]
        return " ".join(words)

    def other_answer(self, fact: Fact, chance: random.Random) -> str:
        """That of another subject, any other name, or one that is made up; never what the fact has changed to."""
        others = [answer for answer in self.of[fact.relation] if answer != fact.answer]
        while True:
            (kind,) = chance.choices(list(NEW_ANSWERS), list(NEW_ANSWERS.values()))
            answer = (
                self.made_up(chance) if kind == "made up" else chance.choice(others if kind == "alike" else self.known)
            )
            if answer not in (fact.answer, self.now.get(fact.id)):
                return answer


def record(fact: Fact, questions: list[str]) -> dict[str, Any]:
    return {"id": fact.id, "input": questions[0], "output": fact.answer, "human_rephrases": questions[1:]}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def new_model(folder: Path) -> None:
    """A small BART with random weights, and a tokenizer that can spell anything."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend(" ")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r" ?[^\s?,']+|."), "isolated"),  # Ramos-Horta and Jr. are words, too
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


def in_half(source: Path, place: Path, weights: str) -> None:
    """A folder again, its weights in half precision."""
    shutil.copytree(source, place, ignore=shutil.ignore_patterns(weights))
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / weights).items()
    }
    save_file(tensors, place / weights, metadata={"format": "pt"})
    (place / weights).chmod(0o644)


def run(command: str, *options: object) -> None:
    arguments = [command, *map(str, options), "--device", "cpu", "--seed", str(SEED)]
    print("factpatch", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "factpatch", *arguments], check=True)


if __name__ == "__main__":
    main()
