"""Scope: decides which of many active facts an input is about, so that each patch is used only where it belongs."""

from factpatch.scope.matching import Calibration
from factpatch.scope.predict import predict_scoped
from factpatch.scope.scope import Scope
from factpatch.scope.training import FALSE_MATCHES, ScopeConfig

__all__ = ["FALSE_MATCHES", "Calibration", "Scope", "ScopeConfig", "predict_scoped"]
