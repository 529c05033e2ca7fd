"""Benchmarks of editing, training, evaluation and merging."""

from factpatch.bench.run import bench_edit, bench_evaluate, bench_train
from factpatch.bench.shapes import SHAPES, kept_features, random_step, shaped_model

__all__ = [
    "SHAPES",
    "bench_edit",
    "bench_evaluate",
    "bench_train",
    "kept_features",
    "random_step",
    "shaped_model",
]
