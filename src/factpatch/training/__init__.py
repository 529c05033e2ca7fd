"""Fine-tuning task models and training editors."""

from factpatch.training.fit import Fit, FitConfig

__all__ = ["Fit", "FitConfig"]
