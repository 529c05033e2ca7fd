"""Prepares a training run: loads an editor to start from, and computes the covariance of inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from factpatch.covariance import Covariance
from factpatch.data.revisions import Revision
from factpatch.editors import TrainableEditor, load_editor
from factpatch.editors.trainable import matching_shapes
from factpatch.errors import MismatchError
from factpatch.models import TaskModel
from factpatch.training.config import TrainConfig, editor_config_class
from factpatch.training.sampler import Indices

COVARIANCE_INPUTS = 2000  # maximum number of control inputs from which a covariance is computed


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
    known = {revisions[i].input: revisions[i].prediction for i in pool[:COVARIANCE_INPUTS]}
    return Covariance.compute(model, known, known)
