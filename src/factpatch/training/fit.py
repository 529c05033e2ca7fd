"""Fine-tuning task models (the paper's appendix): classifiers of claims, encoder-decoders that answer questions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention
from factpatch.data.holdout import hold_out
from factpatch.data.records import Counts, Record, source_hash
from factpatch.device import find_device, surroundings, to_device
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.files import files_into
from factpatch.metrics import accuracy
from factpatch.models import Classifier, Seq2Seq, TaskModel, load_model
from factpatch.models.seq2seq import MAX_ANSWER_TOKENS
from factpatch.processes import accelerator_on
from factpatch.training.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    random_state,
    restore_optimizer,
    restore_random_state,
    save_checkpoint,
)
from factpatch.training.examples import Example, batches_from, read_answered
from factpatch.training.run import Clock, Run, copy_of, sum_gradients, summed, within_error_of_best


@dataclass(frozen=True)
class FitConfig:
    """How to fine-tune. The defaults are the paper's, but for the number of updates, which follows the data's size."""

    task: str = "classify"  # or "answer"
    lr: float = 3e-5
    batch: int = 256
    epochs: float = 10.0  # how long to train, unless steps or minutes say
    steps: int | None = None
    minutes: float | None = None  # the schedule is stretched over this time instead
    warmup: int = 500  # steps, a tenth of all at most
    weight_decay: float = 1e-2
    max_tokens: int = 32  # longer inputs are cut
    entropy: float = 0.1  # classifiers: how much of the predictions' entropy is taken off the loss
    label_smoothing: float = 0.1  # encoder-decoders
    dropout: float | None = None  # as the model's config says, if left out
    labels: list[str] | None = None  # that claims may have; those of the training file, if left out
    holdout: int | None = None  # records of train that choose the best weights: 1000 claims, 500 facts, a tenth at most
    validations: int = 20  # how often they do
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        positive = ("lr", "batch", "epochs", "max_tokens", "validations", "steps", "minutes", "holdout")
        problems = [
            f"{name}={values[name]} must be above 0" for name in positive if not 0 < values.get(name, 1) < math.inf
        ]
        if not self.checkpoint_seconds >= 0:
            problems.append(f"checkpoint_seconds={self.checkpoint_seconds} must not be below 0")
        if self.task not in ("classify", "answer"):
            problems.append(f"task={self.task} must be classify or answer")
        if self.lr > 1:
            problems.append(f"lr={self.lr} must be at most 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be at least 0 and below 1")
        if problems:
            raise InputError("; ".join(problems))


@dataclass(frozen=True)
class Status:
    """Where a run stands, for whoever watches it."""

    step: int
    share: float  # of the whole run
    loss: float
    score: float | None  # of the held-out slice, at the last validation


class Fit(Run):
    """One fine-tuning run in one folder."""

    def __init__(
        self, config: FitConfig, model_name: str, output: str | Path, resume: bool = False, device: str | None = None
    ):
        super().__init__(output, resume)
        self.config = config
        self.model_name = model_name
        self.device = device

    def run(
        self,
        train: str | Path,
        dev: str | Path | None,
        skip_bad: bool = False,
        watch: Callable[[Status], object] = lambda status: None,
        valid: str | Path | None = None,
    ) -> dict[str, Any]:
        """Trains, keeps the weights that are best on a slice held out of train, or on `valid`; measures them on dev."""
        config = self.config
        self.watch = watch
        torch.manual_seed(config.seed)
        self.identity = {
            "model_name": self.model_name,
            "train": source_hash(train),
            "valid": source_hash(valid) if valid else None,
        }
        labels = None
        if config.task == "classify":
            records, counts = read_answered(train, skip_bad, config.labels)
            labels = sorted(config.labels or _labels_of(records))
            if not 2 <= len(labels) <= 100:
                raise InputError(
                    f"expected 2 to 100 labels in {train}, found {len(labels)}; for free answers use --task answer"
                )
            self._load(labels)
        else:
            self._load(None)
            records, counts = read_answered(train, skip_bad, check=self._check_answer)
        dev_records, dev_counts = read_answered(dev, skip_bad, labels) if dev else ([], Counts())
        valid_counts = Counts()
        if valid:
            (self.held_out, valid_counts), kept = read_answered(valid, skip_bad, labels), records
        else:
            self.held_out, kept = hold_out(
                records, config.holdout or min(1000 if labels else 500, len(records) // 10), config.seed
            )
        examples = self._examples(kept)
        if config.task == "answer":
            self._set_answer_length(examples)

        self._train(examples)
        seconds = self.clock.seconds()
        name = "accuracy" if config.task == "classify" else "exact_match"
        result: dict[str, Any] = {
            name: self._score(dev_records) if dev_records else None,
            f"held_out_{name}": self.best_score,
            "best_step": self.best_step,
            "steps": self.step,
            "records": counts.read,
            "examples": len(examples),
            "dev_records": len(dev_records),
            "labels": list(self.model.labels) if isinstance(self.model, Classifier) else None,
            "left_out": counts.left_out + dev_counts.left_out + valid_counts.left_out,
            "bad": counts.bad + dev_counts.bad + valid_counts.bad,
            "seconds": seconds,
        }
        if self.accelerator.is_main_process:
            self._save(result)
        return result

    def _load(self, labels: list[str] | None) -> None:
        config = self.config
        self.accelerator = accelerator_on(find_device(self.device))
        self.model = load_model(self.model_name, self.device, torch.float32, config.task, labels, config.dropout)
        self.model.model.to(self.accelerator.device)

    # The loop

    def _train(self, examples: list[Example]) -> None:
        """Leaves the model with the best weights."""
        config = self.config
        network = self.model.model.requires_grad_(True)
        on_gpu = self.accelerator.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=on_gpu
        )
        per_epoch = -(-len(examples) // config.batch)
        total = config.steps or max(1, round(config.epochs * per_epoch))
        self.best_score = -1.0
        self.best = copy_of(network)
        self.loss = torch.zeros(())
        self.clock = Clock(total, config.minutes, self._take_up() if self.resume else 0.0)
        self.batches = batches_from(examples, config.batch, config.seed, self.step)
        self._loop(config.validations, config.checkpoint_seconds)
        network.load_state_dict(self.best)
        network.eval().requires_grad_(False)

    @no_cudnn_attention()
    def _update(self, share: float) -> None:
        """Each process takes its share of the batch; summed gradients are those of the whole."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * self._rate(share, config.warmup)
        self.model.model.train()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch = next(self.batches)
        mine = batch[rank::world]
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        if mine:
            with self._mixed_precision():
                loss = summed_loss(self.model, mine, config)
            loss = loss / (len(batch) if config.task == "classify" else sum(len(e.target) for e in batch))
            loss.backward()
        sum_gradients(self.accelerator, self.model.model.parameters())
        self.optimizer.step()
        self.loss = summed(self.accelerator, loss.detach())

    def _look(self) -> float:
        """The last step's loss."""
        loss = float(self.loss)
        self._check_finite([loss], self.model.model)
        return loss

    def _tell(self, share: float) -> None:
        score = self.metrics[-1]["held_out"] if self.metrics else None
        self.watch(Status(self.step, share, self._look(), score))

    def _validate(self, number: int) -> None:
        loss = self._look()
        score = self._score(self.held_out)
        if within_error_of_best(score, [record["held_out"] for record in self.metrics], len(self.held_out)):
            self.best_score, self.best_step, self.best = score, self.step, copy_of(self.model.model)
        self.metrics.append({"step": self.step, "loss": loss, "held_out": score, "seconds": self.clock.seconds()})

    def _score(self, records: Sequence[Record]) -> float:
        self.model.model.eval()
        with self._mixed_precision():
            predictions = self.model.predict([record.input for record in records], cut=True)
        return accuracy(predictions, [record.answers for record in records])

    def _mixed_precision(self) -> torch.autocast:
        """bf16 for products on a GPU; elsewhere float32 throughout."""
        kind = self.accelerator.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")

    # Data

    def _examples(self, records: Sequence[Record]) -> list[Example]:
        """Claims with their labels; for questions, every wording of every fact with its first answer."""
        pairs = [
            (text, record.answers[0])
            for record in records
            for text in ([record.input] if self.config.task == "classify" else record.questions)
        ]
        limit = min(self.config.max_tokens, self.model.max_input_tokens)
        encoded = self.model.encode([text for text, _ in pairs], limit)
        targets = self.model.encode_targets([target for _, target in pairs])
        return [Example(*pair) for pair in zip(encoded, targets, strict=True)]

    def _check_answer(self, record: Record) -> None:
        tokens, most = len(self.model.encode_targets(record.answers[:1])[0]), self.model.max_input_tokens
        if tokens > most:
            raise InputError(f"the model can say {most} tokens, this answer has {tokens}; shorten it, or leave it out")

    def _set_answer_length(self, examples: Sequence[Example]) -> None:
        """The model may say as much as its longest answer; its folder will say so, and how it searches."""
        model = self.model
        assert isinstance(model, Seq2Seq)
        model.limit_answers(min(MAX_ANSWER_TOKENS, max(len(e.target) for e in examples)))
        model.generation.length_penalty = 0.0  # the likeliest answer, not the one whose tokens are likeliest on average
        model.model.generation_config = model.generation

    # Files

    def _checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self._look()
        tensors = {
            "model": copy_of(self.model.model),
            "best": self.best,
            "optimizer": optimizer_tensors(self.optimizer),
            "random": random_state(),
        }
        numbers = {
            **self.identity,
            "config": asdict(self.config),
            "step": self.step,
            "best_step": self.best_step,
            "best_score": self.best_score,
            "seconds": self.clock.seconds(),
            "metrics": self.metrics,
        }
        save_checkpoint(self.folder.checkpoint, self.step, tensors, numbers)

    def _take_up(self) -> float:
        """Everything as it was at the checkpoint; the seconds spent by then."""
        if self.accelerator.is_main_process:
            self.folder.sweep()
        tensors, numbers = load_checkpoint(self.folder.checkpoint)
        wanted = {**asdict(self.config), **self.identity}
        # A checkpoint of an older version does not know the settings that came since; it ran as their defaults say.
        found = {**asdict(FitConfig()), **numbers["config"], **{key: numbers.get(key) for key in self.identity}}
        self.folder.check_settings(found, wanted, free=["lr", "checkpoint_seconds"])
        network = self.model.model
        network.load_state_dict(tensors["model"])
        self.best = {k: v.to(network.device) for k, v in tensors["best"].items()}
        restore_optimizer(self.optimizer, tensors["optimizer"])
        restore_random_state(tensors["random"])
        self.step, self.best_step = numbers["step"], numbers["best_step"]
        self.best_score, self.metrics = numbers["best_score"], numbers["metrics"]
        return numbers["seconds"]

    def _save(self, result: dict[str, Any]) -> None:
        where = surroundings(self.accelerator.device)
        data = {key: self.identity[key] for key in ("train", "valid")}
        about = {"model": self.model_name, **data, "config": asdict(self.config), **where, "result": result}
        with files_into(self.folder.path) as scratch:
            self.model.write_to(scratch)
            (scratch / "fit.json").write_text(json.dumps(about, indent=2) + "\n")
            (scratch / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.metrics))
        self.folder.remove_checkpoint()


def _labels_of(records: Sequence[Record]) -> list[str]:
    """Each label as it is first written; how it is capitalised does not matter."""
    spellings: dict[str, str] = {}
    for record in records:
        label = record.answers[0]
        first = spellings.setdefault(normalize(label), label)
        if label.casefold().split() != first.casefold().split():
            raise InputError(f"labels must differ by more than punctuation, found {first!r} and {label!r}; rename one")
    return list(spellings.values())


def summed_loss(model: TaskModel, examples: Sequence[Example], config: FitConfig) -> Tensor:
    """Over claims; or over all tokens of answers, label-smoothed. Padding, most of a batch of answers, is left out."""
    rows = model.collate([e.encoded for e in examples], [e.target for e in examples])
    labels = rows.labels
    assert labels is not None
    if config.task == "classify":
        return classifier_losses(model.logits(rows), labels, config.entropy).sum()
    width = labels.shape[1]
    numbers = [width * i + t for i, example in enumerate(examples) for t in range(len(example.target))]
    places = to_device(labels.device, numbers)
    scores = model.scores(model.features(replace(rows, target_positions=places)))
    wanted = labels.flatten().index_select(0, places)
    return F.cross_entropy(scores, wanted, label_smoothing=config.label_smoothing, reduction="sum")


def classifier_losses(logits: Tensor, labels: Tensor, entropy: float) -> Tensor:
    """Cross-entropy less a share of the prediction's entropy, which keeps the model from certainty: (rows,)."""
    log_p = logits.float().log_softmax(-1)
    return F.nll_loss(log_p, labels, reduction="none") + entropy * (log_p.exp() * log_p).sum(-1)
