"""Training an editor: the constrained objective, many edits a step, in a run that can be stopped at any moment."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import gather_object
from torch import Tensor

from factpatch.backends import tensor_core_products
from factpatch.data.holdout import hold_out
from factpatch.data.records import source_hash
from factpatch.data.revisions import Revision, editable, read_revisions
from factpatch.device import find_dtype, surroundings
from factpatch.editors import HyperNetwork, Looped
from factpatch.errors import InputError, TrainingError
from factpatch.evaluation import measure, predicted_now
from factpatch.files import atomic_file
from factpatch.metrics import summary
from factpatch.models import TaskModel
from factpatch.processes import accelerator_on, from_first
from factpatch.training.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from factpatch.training.config import TrainConfig, config_from_json, config_to_json
from factpatch.training.objective import Objective, doubts, unedited_outputs
from factpatch.training.run import Clock, Run, copy_of, within_error_of_best
from factpatch.training.step import Learner
from factpatch.training.table import RevisionTable

FINAL_EDITS, FINAL_INPUTS = 200, 200  # of the held-out slice, that the best editor is measured on at the end
FREE_TO_CHANGE = ("checkpoint_seconds", "tracker", "split", "lr", "clip", "graphs")  # between a run and its resumption


@dataclass(frozen=True)
class Status:
    """Where a run stands, for whoever watches it."""

    step: int
    share: float  # of the whole run
    seconds_left: float | None
    edits_per_second: float
    loss: float
    constraints: dict[str, float]  # each one's value, margin and multiplier
    validation: dict[str, Any]  # the last one's figures


class Train(Run):
    """One run in one folder."""

    def __init__(self, config: TrainConfig, model: TaskModel, output: str | Path, resume: bool = False):
        super().__init__(output, resume)
        self.config = config
        if config.tracker and config.tracker not in map(str, get_available_trackers()):
            raise InputError(f"the tracker {config.tracker!r} is not there; install it, or leave tracker out")
        self.accelerator = accelerator_on(model.device, log_with=config.tracker, project_dir=str(self.folder.path))
        model.model.to(self.accelerator.device)
        dtype = find_dtype(config.precision, model.device.type)
        # Validations ask a model as evaluation has it.
        self.judge = _in_float32(model) if model.near_ties and dtype != torch.float32 else model
        self.model = model.cast(dtype)
        torch.manual_seed(config.seed)
        self.editor = HyperNetwork.for_model(model, config.editor, config.layers)
        self.parts = config.split
        self.told_why = False
        self.best = copy_of(self.editor)
        self.means = [math.nan] * (2 + len(config.constraints))

    def run(
        self,
        train: str | Path,
        valid: str | Path | None = None,
        skip_bad: bool = False,
        watch: Callable[[Status], object] = lambda status: None,
        say: Callable[[str], object] = lambda message: None,
        on_prepared: Callable[[float], object] = lambda share: None,
    ) -> dict[str, Any]:
        """Trains, and keeps the last editor and the one that is best on revisions held out of train, or on `valid`."""
        self.say, self.watch = say, watch
        self.train_hash = source_hash(train)
        self.valid_hash = source_hash(valid) if valid else None
        bad: list[str] = []
        revisions = list(read_revisions(train, bad.append if skip_bad else None))
        if valid:
            self.held_out = list(read_revisions(valid, bad.append if skip_bad else None))
        else:
            there = len(revisions)
            size = min(self.config.holdout, there // 10)
            if size < 2:
                raise InputError(f"too few revisions to hold a tenth out: found {there}, need 20; or give --valid")
            self.held_out, revisions = hold_out(revisions, size, self.config.seed)
        with tensor_core_products():  # as they will be measured
            self.held_out = from_first(predicted_now(self.judge, self.held_out))
        self.held_out_edits = editable(self.judge, self.held_out)
        for name, source, edits in (
            ("held out", valid or train, self.held_out_edits),
            ("to train on", train, revisions),
        ):
            if not edits:
                raise InputError(
                    f"{source}: expected revisions with alternatives {name}, found none; make them with revise"
                )
        predicted_now(self.model, revisions[:64])  # or they are another model's
        self.table = table = RevisionTable(self.model, self.editor, revisions, self.config)
        unedited = unedited_outputs(self.model, table, on_prepared)
        if self.config.others == "unsure" and self.config.others_a_step:
            table.prefer(from_first(doubts(self.model, table, unedited, on_prepared)))
        objective = Objective(self.model, self.config, unedited)
        self.learner = Learner(self.editor, self.config, objective, self.accelerator)
        self.lagrangian, self.optimizer = self.learner.lagrangian, self.learner.optimizer
        self._train()

        seconds = self.clock.seconds()
        last = copy_of(self.editor)
        self.editor.load_state_dict(self.best)
        edits = self.held_out_edits[:FINAL_EDITS]
        others = self.held_out[:FINAL_INPUTS]
        result: dict[str, Any] = {
            **self._measure(edits, others),
            "edits": len(edits),
            "retain_inputs": len(others),
            "steps": self.step,
            "best_step": self.best_step,
            "edits_per_second": self.step * self.config.edits / seconds,
            "margin": self.lagrangian.margin("kl") or self.lagrangian.margin("lp"),
            "revisions": len(revisions),
            "bad": len(bad),
            "seconds": seconds,
        }
        if self.accelerator.is_main_process:
            self._save(last, result)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return result

    # The loop

    def _train(self) -> None:
        config = self.config
        self._start_window()
        self.clock = Clock(config.steps, config.minutes, self._take_up() if self.resume else 0.0)
        if not self.resume:
            self._checkpoint()
            self._write_run_files()
        if config.tracker:
            simple = {
                key: value if isinstance(value, int | float) else str(value) for key, value in asdict(config).items()
            }
            self.accelerator.init_trackers("factpatch", simple)
        self._loop(config.validations, config.checkpoint_seconds)

    def _update(self, share: float) -> None:
        """Each process takes its share of the edits; a share that does not fit is run in parts."""
        config, table = self.config, self.table
        self.optimizer.param_groups[0]["lr"] = config.lr * self._rate(share, config.warmup, config.schedule)
        plan = table.plan(self.step)
        mine = plan.part(self.accelerator.process_index, self.accelerator.num_processes)
        while True:
            parts = [part for i in range(self.parts) if len(part := mine.part(i, self.parts))]
            try:
                self.window += self.learner.step([table.batch(part, total=len(plan)) for part in parts])
                self.window_steps += 1
                self._say_once(self.learner.graphed.unrecordable)
                return
            except torch.cuda.OutOfMemoryError:
                if self.learner.graphed.release():
                    continue
                if self.parts >= len(mine):
                    raise TrainingError(
                        "one edit alone does not fit into the GPU's memory; lower rows or max_tokens"
                    ) from None
            torch.cuda.empty_cache()
            self.parts *= 2
            self.say(
                f"a step of {len(mine)} edits does not fit into memory; it is run in {self.parts} parts from here on"
            )

    def _say_once(self, why: str) -> None:
        if why and not self.told_why:
            self.say(f"a step cannot be recorded as a CUDA graph, so it takes longer than it could ({why})")
            self.told_why = True

    def _start_window(self) -> None:
        """Figures are summed on the device until somebody looks at them. What is not finite stays so in the sum."""
        self.window = torch.zeros(2 + len(self.config.constraints), device=self.model.device)
        self.window_steps = 0

    def _look(self) -> list[float]:
        """Means since the last validation: of the loss, each constraint, the gradient's norm."""
        if self.window_steps:
            self.means = (self.window / self.window_steps).tolist()
            self._check_finite(self.means, self.editor)
        return self.means

    def _tell(self, share: float) -> None:
        loss, *values, _ = self._look()
        status = Status(
            self.step,
            share,
            self.clock.left(share),
            self.step * self.config.edits / self.clock.seconds(),
            loss,
            self.lagrangian.describe(values),
            validation=self.metrics[-1] if self.metrics else {},
        )
        self.watch(status)

    # Choosing the best

    def _validate(self, number: int) -> None:
        """Measures a sample of the held-out slice, keeps the best editor, and lets the margins shrink."""
        config = self.config
        loss, *values, norm = self._look()
        chance = random.Random(f"{config.seed}/{number}")
        edits = chance.sample(self.held_out_edits, min(config.validation_edits, len(self.held_out_edits)))
        found = self._measure(
            [self._with_few_paraphrases(revision, chance) for revision in edits],
            chance.sample(self.held_out, min(config.validation_inputs, len(self.held_out))),
        )
        # Two errors: each validation draws a sample of its own.
        if within_error_of_best(_score(found), [_score(record) for record in self.metrics], len(edits), errors=2):
            self.best_step, self.best = self.step, copy_of(self.editor)
        seconds = self.clock.seconds()
        record = {
            "step": self.step,
            "seconds": seconds,
            "edits_per_second": self.step * config.edits / seconds,
            "loss": loss,
            "gradient_norm": norm,
            **self.lagrangian.describe(values),
            **found,
        }
        self.metrics.append(record)
        self.lagrangian.anneal(found["success"])
        self._start_window()
        self._write_run_files()
        if config.tracker:
            self.accelerator.log({k: v for k, v in record.items() if v is not None}, step=self.step)

    def _with_few_paraphrases(self, revision: Revision, chance: random.Random) -> Revision:
        few = {
            kind: tuple(chance.sample(texts, min(self.config.validation_paraphrases, len(texts))))
            for kind, texts in (("rephrases", revision.rephrases), ("human_rephrases", revision.human_rephrases))
        }
        return replace(revision, **few)

    def _measure(self, edits: Sequence[Revision], others: Sequence[Revision]) -> dict[str, Any]:
        """Each process measures its share of the edits; all of them know the whole."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        method = Looped(self.editor, self.config.updates) if self.config.updates > 1 else self.editor
        with tensor_core_products():
            outcomes = measure(method, self.judge, edits[rank::world], others)
        return summary(gather_object(outcomes) if world > 1 else outcomes)

    # Files

    def _checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self._look()
        tensors = {
            "editor": copy_of(self.editor),
            "best": self.best,
            "lagrangian": {**copy_of(self.lagrangian), "window": self.window},
            "optimizer": optimizer_tensors(self.optimizer),
        }
        numbers = {
            **self._identity(),
            "step": self.step,
            "best_step": self.best_step,
            "window_steps": self.window_steps,
            "seconds": self.clock.seconds(),
            "metrics": self.metrics,
        }
        save_checkpoint(self.folder.checkpoint, self.step, tensors, numbers)

    def _take_up(self) -> float:
        """Everything as it was at the checkpoint; the seconds spent by then."""
        if self.accelerator.is_main_process:
            self.folder.sweep()
        tensors, numbers = load_checkpoint(self.folder.checkpoint)
        wanted = self._identity()
        # A checkpoint of an older version does not know the settings that came since; it ran as their defaults say.
        config = config_to_json(config_from_json(numbers["config"]))
        found = {**config, **{key: numbers.get(key) for key in wanted if key != "config"}}
        self.folder.check_settings(found, {**wanted.pop("config"), **wanted}, FREE_TO_CHANGE)
        self.editor.load_state_dict(tensors["editor"])
        self.best = {name: tensor.to(self.model.device) for name, tensor in tensors["best"].items()}
        window = tensors["lagrangian"].pop("window")
        self.lagrangian.load_state_dict(tensors["lagrangian"])
        restore_optimizer(self.optimizer, tensors["optimizer"])
        self.step, self.best_step, self.metrics = numbers["step"], numbers["best_step"], numbers["metrics"]
        self.window, self.window_steps = window.to(self.model.device), numbers["window_steps"]
        return numbers["seconds"]

    def _identity(self) -> dict[str, Any]:
        return {
            "config": config_to_json(self.config),
            "model": self.model.fingerprint,
            "train": self.train_hash,
            "valid": self.valid_hash,
        }

    def _write_run_files(self, result: dict[str, Any] | None = None) -> None:
        """What the run is, and how it goes."""
        if not self.accelerator.is_main_process:
            return
        about = {**self._identity(), **surroundings(self.model.device), "result": result}
        with atomic_file(self.folder.path / "config.json") as scratch:
            scratch.write_text(json.dumps(about, indent=2) + "\n")
        with atomic_file(self.folder.path / "metrics.jsonl") as scratch:
            scratch.write_text("".join(json.dumps(record) + "\n" for record in self.metrics))

    def _save(self, last: dict[str, Tensor], result: dict[str, Any]) -> None:
        """The best editor in `editor`, the last in `last`; checkpoints are not needed any more."""
        self.editor.save(self.folder.path / "editor")
        self.editor.load_state_dict(last)
        self.editor.save(self.folder.path / "last")
        self.editor.load_state_dict(self.best)
        self._write_run_files(result)
        self.folder.remove_checkpoint()


def _in_float32(model: TaskModel) -> TaskModel:
    """A copy."""
    _ = model.fingerprint  # for the copy, too
    return copy.deepcopy(model).cast(torch.float32)


def _score(found: dict[str, Any]) -> float:
    """What the best editors have the most of; the latest of those that cannot be told apart is kept."""
    return (found["success"] + (found["retain"] or 0.0)) / 2
