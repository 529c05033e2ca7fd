"""Helpers for small, quick training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from factpatch.editors import EditorConfig
from factpatch.models import load_model
from factpatch.training import Train, TrainConfig

SMALL = EditorConfig(width=32, bottleneck=8, lstm=8)
QUICK = TrainConfig(
    steps=12, edits=6, rows=6, validations=3, validation_edits=4, validation_inputs=4, warmup=2, editor=SMALL
)
QUICK_FIT: dict[str, Any] = {"lr": 3e-3, "batch": 16, "steps": 60, "warmup": 5, "validations": 6}


def start(config: TrainConfig, model: Path, output: Path, resume: bool = False) -> Train:
    return Train(config, load_model(model, "cpu"), output, resume)


def editor_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "editor.safetensors")
