"""Fine-tunes classifiers of claims, and models that answer questions (De Cao et al., 2021, appendix)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import training_attention
from factpatch.data.holdout import hold_out
from factpatch.data.records import Counts, Record, source_hash
from factpatch.device import PRECISIONS, environment, find_device, find_dtype, to_device
from factpatch.errors import InputError
from factpatch.files import files_into
from factpatch.metrics import accuracy
from factpatch.models import Classifier, TaskModel, load_model
from factpatch.models.text import MAX_ANSWER_TOKENS, TextModel
from factpatch.processes import accelerator_on
from factpatch.training.examples import Example, batches_from, labels_of, read_answered
from factpatch.training.run import Run, copy_of, sum_gradients, summed, within_error_of_best
from factpatch.training.settings import LARGEST

VALIDATION_SHARE = 0.1  # maximum share of the time for validations, in runs limited by minutes
CPU_DEFAULTS: dict[str, Any] = {"batch": 32, "epochs": 3.0}  # defaults of `factpatch fit` on a CPU


@dataclass(frozen=True)
class FitConfig:
    """Settings of fine-tuning. The defaults are the paper's, except that `epochs` sets the number of updates."""

    task: str = "classify"  # or "answer"
    lr: float = 3e-5
    batch: int = 256
    epochs: float = 10.0  # how long to train, unless steps or minutes are given
    steps: int | None = None
    minutes: float | None = None  # stretches the schedule over this time instead
    warmup: int = 500  # steps, at most a tenth of the run
    weight_decay: float = 1e-2
    max_tokens: int = 32  # longer inputs are truncated
    entropy: float = 0.1  # classifiers: weight of the predictions' entropy, which is subtracted from the loss
    label_smoothing: float = 0.1  # answers
    template: str | None = None  # decoders: how a question becomes a prompt; None: what the model's folder records
    dropout: float | None = None  # None: as in the model's config
    labels: list[str] | None = None  # allowed labels; None: those of the training file
    precision: str | None = None  # of matrix products, fp32 or bf16; None: bf16 on a GPU, fp32 on a CPU
    # Number of records held out of train. Up to 1000 claims or 500 facts of them choose the best weights. None: that
    # many, but at most a tenth of train
    holdout: int | None = None
    validations: int = 20  # in the whole run
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        positive = ("lr", "batch", "epochs", "max_tokens", "validations", "steps", "minutes", "holdout")
        problems = [f"{name}={values[name]} must be above 0" for name in positive if not values.get(name, 1) > 0]
        problems += [
            f"{name}={values[name]} must be at most {LARGEST:g}" for name in positive if values.get(name, 1) > LARGEST
        ]
        if not self.checkpoint_seconds >= 0:
            problems.append(f"checkpoint_seconds={self.checkpoint_seconds} must not be below 0")
        if self.task not in ("classify", "answer"):
            problems.append(f"task={self.task} must be classify or answer")
        if self.precision not in (None, *PRECISIONS):
            problems.append(f"precision={self.precision} must be one of {', '.join(PRECISIONS)}")
        if self.lr > 1:
            problems.append(f"lr={self.lr} must be at most 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be at least 0 and below 1")
        if problems:
            raise InputError("; ".join(problems))


@dataclass(frozen=True)
class Status:
    """The state of a run, for reports."""

    step: int
    share: float  # of the whole run
    loss: float
    score: float | None  # on the held-out records, at the last validation


class Fit(Run):
    """Fine-tunes one model, in one folder."""

    changeable = ("lr", "checkpoint_seconds")

    def __init__(
        self, config: FitConfig, model_name: str, output: str | Path, resume: bool = False, device: str | None = None
    ):
        super().__init__(output, resume, config.minutes)
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
        """Trains, keeps the weights that are best on `valid` or on held-out records, and measures them on dev."""
        config = self.config
        self.watch = watch
        torch.manual_seed(config.seed)
        self.data = {"train": source_hash(train), "valid": source_hash(valid) if valid else None}
        self.identity = {**asdict(config), "model_name": self.model_name, **self.data}
        labels, records, counts = self._read_train(train, skip_bad)
        self.dev_records, dev_counts = read_answered(dev, skip_bad, labels) if dev else ([], Counts())
        valid_counts = Counts()
        self.held_out_ids: list[str] | None = None
        if valid:
            self.held_out, valid_counts = read_answered(valid, skip_bad, labels)
        else:
            most = 1000 if labels else 500
            held_out, records = hold_out(records, config.holdout or min(most, len(records) // 10), config.seed)
            self.held_out = held_out[:most]  # the rest is held out for editors, and would make validations slow
            self.held_out_ids = [record.id for record in held_out]
        examples = self._examples(records)
        if config.task == "answer":
            self._set_answer_length(examples)

        self.dtype = find_dtype(config.precision, self.accelerator.device.type)
        self._train(examples)
        name = "accuracy" if config.task == "classify" else "exact_match"
        result: dict[str, Any] = {
            name: self._score(self.dev_records) if self.dev_records else None,
            f"held_out_{name}": next(r["held_out"] for r in self.metrics if r["step"] == self.best_step),
            "best_step": self.best_step,
            "steps": self.step,
            "records": counts.read,
            "examples": len(examples),
            "dev_records": len(self.dev_records),
            "labels": list(self.model.labels) if isinstance(self.model, Classifier) else None,
            "left_out": counts.left_out + dev_counts.left_out + valid_counts.left_out,
            "bad": counts.bad + dev_counts.bad + valid_counts.bad,
            "seconds": self.clock.seconds(),
        }
        if self.accelerator.is_main_process:
            self._save(result)
        return result

    def _read_train(self, train: str | Path, skip_bad: bool) -> tuple[list[str] | None, list[Record], Counts]:
        """Loads the model and reads its training data, from which a classifier gets its labels."""
        config = self.config
        if config.task == "answer":
            self._load(None)
            return None, *read_answered(train, skip_bad, check=self._check_answer)
        records, counts = read_answered(train, skip_bad, config.labels)
        labels = sorted(config.labels or labels_of(records))
        if not 2 <= len(labels) <= 100:
            raise InputError(
                f"expected 2 to 100 labels in {train}, found {len(labels)}; for free answers use --task answer"
            )
        self._load(labels)
        return labels, records, counts

    def _load(self, labels: list[str] | None) -> None:
        config = self.config
        self.accelerator = accelerator_on(find_device(self.device))
        self.model = load_model(
            self.model_name, self.device, torch.float32, config.task, labels, config.dropout, config.template
        )
        self.network = self.model.model.to(self.accelerator.device)

    # The loop

    def _train(self, examples: list[Example]) -> None:
        """Trains the model and leaves it with the best weights."""
        config, network = self.config, self.network.requires_grad_(True)
        on_gpu = self.accelerator.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=on_gpu
        )
        per_epoch = -(-len(examples) // config.batch)
        self.modules, self.optimizers = {"model": network}, {"optimizer": self.optimizer}
        self.best = copy_of(network)
        self.loss = torch.zeros(())
        self._start(config.steps or max(1, round(config.epochs * per_epoch)))
        self.batches = batches_from(examples, config.batch, config.seed, self.step)
        self._loop(lambda done: int(done * config.validations), config.checkpoint_seconds, VALIDATION_SHARE)
        network.load_state_dict(self.best)
        network.eval().requires_grad_(False)

    def _update(self, share: float) -> None:
        """Makes one step. Each process runs a share of the batch; the summed gradients are those of the whole batch."""
        config = self.config
        self.optimizer.param_groups[0]["lr"] = config.lr * self._rate(share, config.warmup)
        self.network.train()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch = next(self.batches)
        mine = batch[rank::world]
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        if mine:
            with training_attention(self.accelerator.device, self.dtype):
                with self._mixed_precision():
                    loss = summed_loss(self.model, mine, config)
                loss = loss / (len(batch) if config.task == "classify" else sum(len(e.target) for e in batch))
                loss.backward()
        sum_gradients(self.accelerator, self.network.parameters())
        self.optimizer.step()
        self.loss = summed(self.accelerator, loss.detach())

    def _check(self) -> float:
        """Returns the loss of the last step; raises a TrainingError if it is not finite."""
        loss = float(self.loss)
        self._check_finite([loss])
        return loss

    def _report(self, share: float) -> None:
        score = self.metrics[-1]["held_out"] if self.metrics else None
        self.watch(Status(self.step, share, self._check(), score))

    def _validate(self, number: int) -> None:
        loss = self._check()
        score = self._score(self.held_out)
        if within_error_of_best(score, [record["held_out"] for record in self.metrics], len(self.held_out)):
            self.best_step, self.best = self.step, copy_of(self.network)
        seconds = self.clock.training_seconds()
        self.metrics.append({"step": self.step, "loss": loss, "held_out": score, "seconds": seconds})

    def _final_seconds(self) -> float:
        return self.last_validation * len(self.dev_records) / max(1, len(self.held_out))

    def _score(self, records: Sequence[Record]) -> float:
        self.network.eval()
        with self._mixed_precision():
            predictions = self.model.predict([record.input for record in records], cut=True)
        return accuracy(predictions, [record.answers for record in records])

    def _mixed_precision(self) -> torch.autocast:
        """Computes matrix products in the run's precision."""
        return torch.autocast(self.accelerator.device.type, self.dtype, enabled=self.dtype != torch.float32)

    # Data

    def _examples(self, records: Sequence[Record]) -> list[Example]:
        """Encodes claims with their labels or, for questions, every wording of a fact with its first answer."""
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
        tokens = len(self.model.encode_targets(record.answers[:1])[0])
        most = min(MAX_ANSWER_TOKENS, self.model.max_input_tokens)
        if tokens > most:
            raise InputError(f"answers can have {most} tokens, this one has {tokens}; shorten or remove it")

    def _set_answer_length(self, examples: Sequence[Example]) -> None:
        """Limits answers to the length of the longest target, which is saved with the model."""
        assert isinstance(self.model, TextModel)
        self.model.fit_answers(min(MAX_ANSWER_TOKENS, max(len(e.target) for e in examples)))

    def _save(self, result: dict[str, Any]) -> None:
        """Writes the model's folder, including its settings and the held-out facts of train."""
        where = environment(self.accelerator.device)
        about = {"model": self.model_name, **self.data, "config": asdict(self.config), **where, "result": result}
        with files_into(self.folder.path) as scratch:
            self.model.write_to(scratch)
            (scratch / "fit.json").write_text(json.dumps(about, indent=2) + "\n")
            (scratch / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.metrics))
            if self.held_out_ids is not None:
                held_out = {"data": self.data["train"], "seed": self.config.seed, "ids": self.held_out_ids}
                (scratch / "held-out.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=2) + "\n")
        self.folder.remove_checkpoint()


def summed_loss(model: TaskModel, examples: Sequence[Example], config: FitConfig) -> Tensor:
    """Computes the loss, summed over claims or over answer tokens (with label smoothing).

    The head does not run on padding.
    """
    rows = model.collate([e.encoded for e in examples], [e.target for e in examples])
    labels = rows.labels
    assert labels is not None
    if config.task == "classify":
        return classifier_losses(model.logits(rows), labels, config.entropy).sum()
    width = labels.shape[1]
    numbers = [width * i + t for i, example in enumerate(examples) for t in range(len(example.target))]
    positions = to_device(labels.device, numbers)
    scores = model.scores(model.features(replace(rows, target_positions=positions)))
    wanted = labels.flatten().index_select(0, positions)
    return F.cross_entropy(scores, wanted, label_smoothing=config.label_smoothing, reduction="sum")


def classifier_losses(logits: Tensor, labels: Tensor, entropy: float) -> Tensor:
    """Computes each row's cross-entropy minus a share of its entropy, which keeps the model from becoming certain."""
    log_p = logits.float().log_softmax(-1)
    return F.nll_loss(log_p, labels, reduction="none") + entropy * (log_p.exp() * log_p).sum(-1)
