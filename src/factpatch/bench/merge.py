"""Benchmark of merging, with random patches for a random model."""

from __future__ import annotations

import random
import resource
import sys
import time
from typing import Any

import torch

from factpatch.bench.shapes import ANSWER_TOKENS, WORDS
from factpatch.covariance import Covariance
from factpatch.deltas import Delta, LowRank
from factpatch.facts import FactEdit
from factpatch.merging import Mode, merge
from factpatch.models import Classifier, TaskModel
from factpatch.patch import Patch, weight_shape

DIFFERENT = 8  # sets of random factors, which the patches share so that they do not fill the memory
OTHERS = 256  # number of texts that the covariance is computed from


def bench_merge(model: TaskModel, facts: int, tokens: int, mode: Mode) -> dict[str, Any]:
    """Times the covariance of 256 texts, and merging `facts` patches of `tokens` tokens and rank tokens + 1 each."""
    rng = random.Random(0)
    texts = [_text(rng, tokens) for _ in range(facts + OTHERS)]
    start = time.perf_counter()
    others = texts[facts:]
    answers = {text: _text(rng, ANSWER_TOKENS) for text in others}
    covariance = Covariance.compute(model, others, answers)
    covariance_seconds = time.perf_counter() - start
    factors = [_random_factors(model, tokens + 1) for _ in range(min(DIFFERENT, facts))]
    targets = model.labels if isinstance(model, Classifier) else [_text(rng, ANSWER_TOKENS) for _ in range(facts)]
    edits = [FactEdit(text, rng.choice(targets)) for text in texts[:facts]]
    patches = [Patch(factors[i % len(factors)], model.fingerprint, "random", (edit,)) for i, edit in enumerate(edits)]
    start = time.perf_counter()
    merged = merge(model, patches, covariance=covariance, mode=mode)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds = time.perf_counter() - start
    return {
        "facts": facts,
        "tokens": tokens,
        "mode": mode,
        "merge_seconds": seconds,
        "covariance_seconds": covariance_seconds,
        "facts_per_second": facts / seconds,
        "patch_bytes": merged.nbytes,
        "peak_memory_bytes": _peak_memory(model.device),
    }


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(WORDS, k=tokens))


def _random_factors(model: TaskModel, rank: int) -> dict[str, Delta]:
    deltas: dict[str, Delta] = {}
    for name, layer in model.layers.items():
        out, in_ = weight_shape(layer)
        A, B = (torch.randn(rank, width, device=model.device) for width in (in_, out))
        deltas[name] = LowRank(A, 1e-4 * B)
    return deltas


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
