"""Trains an editor: a constrained objective over many edits per step, in a run that can be stopped and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers

from factpatch.data.records import source_hash
from factpatch.data.revisions import Revision
from factpatch.data.targets import check_kinds
from factpatch.device import environment, find_dtype
from factpatch.editors import Looped, find_method
from factpatch.errors import InputError, TrainingError
from factpatch.fingerprints import hash_tensors
from factpatch.models import TaskModel
from factpatch.processes import accelerator_on
from factpatch.training.averaging import MovingAverage
from factpatch.training.config import TrainConfig, config_to_json
from factpatch.training.preparing import in_float32, prepare, read_split, trained_editor
from factpatch.training.run import Run, copy_of, within_error_of_best
from factpatch.training.step import Means
from factpatch.training.together import merged_at
from factpatch.training.validation import Validator, score_of

FINAL_SHARE = 0.1  # maximum share of the time for the measurement at the end, in runs limited by minutes
ENOUGH_STEPS, ENOUGH_SUCCESS = 100, 0.5  # an editor below either of them does not count as trained


@dataclass(frozen=True)
class Status:
    """The state of a run, for reports."""

    step: int
    share: float  # of the whole run
    seconds_left: float | None
    edits_per_second: float
    loss: float
    constraints: dict[str, float]  # value, margin and multiplier of each
    validation: dict[str, Any]  # metrics of the last validation


class Train(Run):
    """Trains one editor for a model, in one folder. The model is left unchanged."""

    changeable = ("checkpoint_seconds", "tracker", "split", "lr", "clip", "graphs")

    def __init__(
        self,
        config: TrainConfig,
        model: TaskModel,
        output: str | Path,
        resume: bool = False,
        init: str | Path | None = None,
    ):
        """`init` is the folder of a trained editor to start from."""
        super().__init__(output, resume, config.minutes)
        self.config = config
        if config.tracker and config.tracker not in map(str, get_available_trackers()):
            raise InputError(f"the tracker {config.tracker!r} is not available; install it, or leave tracker out")
        self.accelerator = accelerator_on(model.device, log_with=config.tracker, project_dir=str(self.folder.path))
        if config.together > 1 and self.accelerator.num_processes > 1:
            raise InputError("edits are merged in one process only; train without accelerate launch, or set together=1")
        check_kinds(model, config.targets)
        model.model.to(self.accelerator.device)
        self.model = model
        torch.manual_seed(config.seed)
        if init:
            self.editor, self.config = trained_editor(init, model, config)
        else:
            self.editor = find_method(config.method).load_class().for_model(model, config.editor, config.layers)
        self.init = hash_tensors(self.editor.state_dict()) if init else None
        if config.together > 1:
            self.editor.least_squares = None  # an editor given by --init may have one; the merge replaces it
            self.editor.learn_ridge()
        self.network = self.editor
        self.best = copy_of(self.editor)
        self.parts = config.split
        self.warned = False
        self.values = [math.nan] * (2 + len(config.constraints))

    def run(
        self,
        train: str | Path,
        valid: str | Path | None = None,
        skip_bad: bool = False,
        watch: Callable[[Status], object] = lambda status: None,
        warn: Callable[[str], object] = lambda message: None,
        on_stage: Callable[[str, float], object] = lambda stage, share: None,
    ) -> dict[str, Any]:
        """Trains, and saves the last editor and the one that is best on `valid` or on revisions held out of train.

        `watch` is called with the state of the run, `warn` with messages, `on_stage` with the progress of other stages.
        """
        self.watch, self.warn, self.on_stage = watch, warn, on_stage
        hashes = {"train": source_hash(train), "valid": source_hash(valid) if valid else None}
        self.about = {"config": config_to_json(self.config), "model": self.model.fingerprint, **hashes}
        self.about["init"] = self.init
        self.identity = {**self.about["config"], **{k: v for k, v in self.about.items() if k != "config"}}
        bad: list[str] = []
        on_bad = bad.append if skip_bad else None
        held_out, revisions = read_split(train, valid, self.model, self.config, on_bad, warn)
        dtype = find_dtype(self.config.precision, self.model.device.type)
        # Validations use the precision in which editors are evaluated.
        precise = in_float32(self.model) if self.model.near_ties and dtype != torch.float32 else self.model
        with self.model.in_precision(dtype):
            self._prepare(precise, held_out, revisions, valid or train)
            self._train()
            result = {**self._finish(), "revisions": len(revisions), "bad": len(bad), "seconds": self.clock.seconds()}
        if self.accelerator.is_main_process:
            self._write_run_files(result)
            self.folder.remove_checkpoint()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return result

    # Set-up

    def _prepare(
        self, precise: TaskModel, held_out: list[Revision], revisions: list[Revision], source: str | Path
    ) -> None:
        config, model = self.config, self.model
        self.on_stage("predicting held-out answers", 0.0)
        self.validator = Validator(precise, held_out, config, self.accelerator)
        if not self.validator.edits:
            raise InputError(
                f"{source}: expected held-out revisions with alternatives, found none; make them with revise"
            )
        new = self.init is None
        prepared = prepare(model, self.editor, config, revisions, self.accelerator, new, self.on_stage)
        self.sampler, self.batcher, self.learner = prepared.sampler, prepared.batcher, prepared.learner
        self.epoch_rows, self.validator.covariance = prepared.epoch_rows, prepared.covariance
        self.best = copy_of(self.editor)
        self.means = Means(2 + len(config.constraints)).to(model.device)
        self.modules = {"editor": self.editor, "lagrangian": self.learner.lagrangian, "means": self.means}
        self.average = MovingAverage(self.editor, config.ema) if config.ema else None
        if self.average:
            self.modules["average"] = self.average
        self.optimizers = {
            "optimizer": self.learner.optimizer,
            "multiplier_optimizer": self.learner.lagrangian.optimizer,
        }

    # The loop

    def _train(self) -> None:
        config = self.config
        self._start(config.steps)
        if not self.resume:
            self._save_checkpoint()
            self._write_run_files()
        if config.tracker:
            simple = {k: v if isinstance(v, int | float) else str(v) for k, v in asdict(config).items()}
            self.accelerator.init_trackers("factpatch", simple)
        self._loop(self._validations_due, config.checkpoint_seconds, config.validation_share)

    def _validations_due(self, done: float) -> int:
        if self.config.validate_epochs:
            return self.step * self.config.edits * self.config.rows // self.epoch_rows
        return int(done * self.config.validations)

    def _update(self, share: float) -> None:
        """Makes one step. Each process takes its share of the edits and, if these do not fit, runs them in parts."""
        config = self.config
        linear = config.multiplier_schedule == "linear"
        self.learner.set_rates(
            editor=config.lr * self._rate(share, config.warmup, config.schedule),
            multipliers=config.multiplier_lr * (self._rate(share, config.warmup) if linear else 1.0),
        )
        plan = self.sampler.plan(self.step, merged_at(share, config.together) if config.together > 1 else None)
        mine = plan.part(self.accelerator.process_index, self.accelerator.num_processes)
        while True:
            parts = [part for i in range(self.parts) if len(part := mine.part(i, self.parts))]
            try:
                self.means.add(self.learner.step([self.batcher.batch(part, total=len(plan)) for part in parts]))
                if self.average:
                    self.average.update(self.editor, self.step)
                self._warn_once(self.learner.graphed.unrecordable)
                return
            except torch.cuda.OutOfMemoryError:
                if self.learner.graphed.release():
                    continue
                if config.together > 1:
                    raise TrainingError("a step does not fit into the GPU's memory; lower rows or together") from None
                if self.parts >= len(mine):
                    raise TrainingError(
                        "not even one edit fits into the GPU's memory; lower rows or max_tokens"
                    ) from None
            torch.cuda.empty_cache()
            self.parts *= 2
            self.warn(f"{len(mine)} edits do not fit into memory; from now on each step is run in {self.parts} parts")

    def _warn_once(self, reason: str) -> None:
        if reason and not self.warned:
            self.warn(f"steps cannot be recorded as CUDA graphs, which makes them slower ({reason})")
            self.warned = True

    def _check(self) -> list[float]:
        """Returns the means of the loss, each constraint and the gradient norm since the last validation.

        Raises a TrainingError if they are not finite.
        """
        if values := self.means.read():
            self._check_finite(values)
            self.values = values
        return self.values

    def _report(self, share: float) -> None:
        loss, *values, _ = self._check()
        status = Status(
            self.step,
            share,
            self.clock.seconds_left(share),
            self.step * self.config.edits / self.clock.training_seconds(),
            loss,
            self.learner.lagrangian.describe(values),
            validation=self.metrics[-1] if self.metrics else {},
        )
        self.watch(status)

    # Choosing the best editor

    def _validate(self, number: int) -> None:
        """Measures the editor on a sample of the held-out revisions, keeps the best, and lets the margins shrink."""
        loss, *values, norm = self._check()
        sample = self.validator.sample(number)
        with self._averaged():
            found = self._measure(sample, "validating")
            # Two standard errors, because each validation draws its own sample.
            earlier = [score_of(record) for record in self.metrics]
            if within_error_of_best(score_of(found), earlier, len(sample[0]), errors=2):
                self.best_step, self.best = self.step, copy_of(self.editor)
        seconds = self.clock.training_seconds()
        record = {
            "step": self.step,
            "seconds": seconds,
            "edits_per_second": self.step * self.config.edits / seconds,
            "loss": loss,
            "gradient_norm": norm,
            **self.learner.lagrangian.describe(values),
            **found,
        }
        self.metrics.append(record)
        self.learner.lagrangian.anneal(found["success"])
        self.means.clear()
        self._write_run_files()
        if self.config.tracker:
            self.accelerator.log({k: v for k, v in record.items() if v is not None}, step=self.step)

    def _averaged(self) -> AbstractContextManager[None]:
        """Gives the editor its averaged weights for a `with` block, if they are averaged."""
        return self.average.used_by(self.editor) if self.average else nullcontext()

    def _measure(self, sample: tuple[list[Revision], list[Revision]], stage: str) -> dict[str, Any]:
        method = Looped(self.editor, self.config.updates) if self.config.updates > 1 else self.editor
        return self.validator.measure(method, sample, lambda share: self.on_stage(stage, share))

    def _final_seconds(self) -> float:
        seconds = self.last_validation * self.validator.relative_cost()
        return seconds if self.config.minutes is None else min(seconds, FINAL_SHARE * 60 * self.config.minutes)

    def _finish(self) -> dict[str, Any]:
        """Measures the best editor and saves it as `editor`, and the last one as `last`."""
        seconds = self.clock.training_seconds()
        full = self.last_validation * self.validator.relative_cost()
        with self._averaged():
            last = copy_of(self.editor)
        self.editor.load_state_dict(self.best)
        edits, controls = self.validator.final_sample(self._final_seconds() / full if full else 1.0)
        found = self._measure((edits, controls), "measuring the best editor")
        if self.accelerator.is_main_process:
            self.editor.save(self.folder.path / "editor")
            self.editor.load_state_dict(last)
            self.editor.save(self.folder.path / "last")
            self.editor.load_state_dict(self.best)
        best = max((record["success"] for record in self.metrics), default=0.0)
        lagrangian = self.learner.lagrangian
        return {
            **found,
            "edits": len(edits),
            "retain_inputs": len(controls),
            "steps": self.step,
            "best_step": self.best_step,
            "trained": self.step >= ENOUGH_STEPS and best >= ENOUGH_SUCCESS,
            "edits_per_second": self.step * self.config.edits / seconds,
            "margin": lagrangian.margin("kl") or lagrangian.margin("lp"),
        }

    def _write_run_files(self, result: dict[str, Any] | None = None) -> None:
        """Writes config.json, with the result once there is one, and metrics.jsonl."""
        if not self.accelerator.is_main_process:
            return
        about = {**self.about, **environment(self.model.device), "result": result}
        self.folder.write_records(about, self.metrics)
