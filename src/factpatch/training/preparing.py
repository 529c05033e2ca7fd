"""Prepares a training run: loads an editor to start from, reads the revisions, and builds what the steps use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from factpatch.covariance import Covariance
from factpatch.data.holdout import hash_shuffled
from factpatch.data.revisions import Revision, load_revisions, teachable
from factpatch.data.targets import find_targets
from factpatch.editors import TrainableEditor, load_editor
from factpatch.editors.trainable import matching_shapes
from factpatch.errors import MismatchError
from factpatch.models import TaskModel
from factpatch.training.batcher import Batcher
from factpatch.training.config import TrainConfig, editor_config_class
from factpatch.training.controls import prepare_controls
from factpatch.training.objective import Objective
from factpatch.training.sampler import Indices, Sampler, with_wordings
from factpatch.training.step import Learner
from factpatch.training.together import MergedGradients
from factpatch.training.unedited import unedited_outputs
from factpatch.training.validation import split_revisions

COVARIANCE_INPUTS = 2000  # maximum number of control inputs from which a covariance is computed


@dataclass(frozen=True)
class Prepared:
    """Everything that the steps of a run use."""

    sampler: Sampler
    batcher: Batcher
    learner: Learner
    epoch_rows: int  # number of revisions to train on
    covariance: Covariance | None  # of control inputs, if edits are merged


def trained_editor(folder: str | Path, model: TaskModel, config: TrainConfig) -> tuple[TrainableEditor, TrainConfig]:
    """Loads a trained editor to start from, and returns it with a config that has its settings."""
    editor = load_editor(folder, model.device)
    editor.check_fits(model)
    if config.editor not in (editor.config, editor_config_class(config.method)()) or config.method != editor.name:
        raise MismatchError(f"the editor in {folder} was trained with other editor.* settings; leave these out")
    if config.layers != ("*",) and matching_shapes(model, config.layers) != editor.shapes:
        raise MismatchError(f"the editor in {folder} edits other weights than layers names; leave layers out")
    return editor, replace(config, editor=editor.config, layers=tuple(editor.shapes))


def in_float32(model: TaskModel) -> TaskModel:
    """Returns a copy of a model in float32, with the fingerprint of the original."""
    _ = model.fingerprint  # cached before copying, so that the copy has it, too
    return copy.deepcopy(model).cast(torch.float32)


def covariance_of(model: TaskModel, revisions: Sequence[Revision], pool: Indices) -> Covariance:
    """Computes the covariance of a sample of the control inputs."""
    chosen = np.linspace(0, len(pool) - 1, min(len(pool), COVARIANCE_INPUTS)).astype(np.int64)  # of all lengths
    known = {revisions[i].input: revisions[i].prediction for i in pool[chosen]}
    return Covariance.compute(model, known, known)


def read_split(
    train: str | Path,
    valid: str | Path | None,
    model: TaskModel,
    config: TrainConfig,
    on_bad: Callable[[str], object] | None,
    warn: Callable[[str], object],
) -> tuple[list[Revision], list[Revision]]:
    """Reads the held-out revisions and those to train on."""
    revisions = load_revisions(train, model, on_bad, warn)
    if not valid:
        return split_revisions(revisions, model, config, warn)
    return load_revisions(valid, model, on_bad, warn), revisions


def prepare(
    model: TaskModel,
    editor: TrainableEditor,
    config: TrainConfig,
    revisions: Sequence[Revision],
    accelerator: Accelerator,
    calibrate: bool,
    on_stage: Callable[[str, float], object],
) -> Prepared:
    """Fits the editor to the training data and builds what the steps use.

    `calibrate` must be set for new editors. `on_stage` is called with the progress.
    """
    revisions = with_wordings(teachable(model, revisions), config)
    targets = find_targets(model, revisions, config.targets, config.seed)
    sampler = Sampler(revisions, config, targets)
    batcher = Batcher(model, editor, revisions, config, targets)
    sampler.sort_pool(batcher.control_lengths(sampler.pool))
    if calibrate:
        editor.calibrated(model, hash_shuffled(revisions, config.seed))
    if config.ridge is not None:
        editor.solve_against(covariance_of(model, revisions, sampler.pool), config.ridge, config.shrinkage)

    def on_share(share: float) -> None:
        on_stage("running the unedited model on control inputs", share)

    unedited = unedited_outputs(model, batcher, sampler.pool, on_share)
    prepare_controls(sampler, model, batcher, revisions, unedited, on_share)
    objective = Objective(model, config, unedited)
    covariance = covariance_of(model, revisions, sampler.pool) if config.together > 1 else None
    merged = None if covariance is None else MergedGradients(editor, objective, covariance)
    learner = Learner(editor, config, objective, accelerator, merged)
    return Prepared(sampler, batcher, learner, len(revisions), covariance)
