"""Fine-tuning task models and training editors."""

from factpatch.training.config import PRESETS, TrainConfig, resolve_config
from factpatch.training.fit import Fit, FitConfig
from factpatch.training.train import Train

__all__ = ["PRESETS", "Fit", "FitConfig", "Train", "TrainConfig", "resolve_config"]
