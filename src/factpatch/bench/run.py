"""Benchmarks: the engine beside the published way and beside the frozen model alone, in one run on the same rows."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.bench.shapes import kept_features, random_edits, random_rows, random_step
from factpatch.bench.ways import forward_and_back, frozen_alone, propose_and_run, published_step, published_way
from factpatch.deltas import Delta
from factpatch.editors.hypernetwork import HyperNetwork
from factpatch.engine import edited
from factpatch.models import TaskModel
from factpatch.processes import accelerator_on
from factpatch.training import TrainConfig
from factpatch.training.objective import Objective
from factpatch.training.step import Learner

# Editing


@dataclass(frozen=True)
class EditTimes:
    """Seconds, the median of several runs."""

    batch: float  # all edits at once
    one: float  # one edit alone
    reference: float  # one edit, the published way
    limit: float  # all edits' forwards and backwards through the frozen model, nothing else
    factor_bytes: int

    def summary(self, edits: int) -> dict[str, float | int]:
        return {
            **_rates(edits, self.batch, self.reference, self.limit),
            "one_edit_per_second": 1 / self.one,
            "one_edit_speedup": self.reference / self.one,
            "factor_bytes": self.factor_bytes,
        }


@torch.no_grad()
def bench_edit(
    model: TaskModel,
    edits: int = 8,
    rows: int = 8,
    tokens: int = 16,
    repeats: int = 5,
    tick: Callable[[], object] = lambda: None,
) -> EditTimes:
    """Propose, then one edited forward of `rows` rows an edit; no optimizer.

    The ways take turns, so that noise hits all alike.
    """
    editor = HyperNetwork.for_model(model)
    many, one = random_edits(model, edits, tokens), random_edits(model, 1, tokens)
    many_rows, one_rows = random_rows(model, edits * rows, tokens), random_rows(model, rows, tokens)
    factor_bytes = _nbytes(editor.update(model, many))
    ways: dict[str, Callable[[], object]] = {
        "batch": lambda: propose_and_run(editor, model, many, many_rows),
        "one": lambda: propose_and_run(editor, model, one, one_rows),
        "reference": lambda: published_way(editor, model, one, one_rows),
        "limit": lambda: frozen_alone(model, many, many_rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken = _timed(way, model.device)
            tick()
            if repeat:  # the first round warms up
                seconds[name].append(taken)
    return EditTimes(factor_bytes=factor_bytes, **{name: statistics.median(taken) for name, taken in seconds.items()})


# Training


@dataclass(frozen=True)
class TrainTimes:
    """Seconds of one step, the median of several; and of the first three together, of which one is being recorded."""

    step: float  # of all edits, as training takes it
    reference: float  # of one edit, the published way
    limit: float  # all rows forward, and backward to their inputs, through the frozen model alone
    prepared: float
    recorded: bool  # whether the step ran as a CUDA graph
    factor_bytes: int

    def summary(self, edits: int) -> dict[str, float | int]:
        return {
            **_rates(edits, self.step, self.reference, self.limit),
            "prepare_seconds": self.prepared,
            "recorded": self.recorded,
            "factor_bytes": self.factor_bytes,
        }


@no_cudnn_attention()
@tensor_core_products()
def bench_train(
    model: TaskModel,
    edits: int = 128,
    rows: int = 16,
    tokens: int = 32,
    repeats: int = 20,
    tick: Callable[[], object] = lambda: None,
) -> TrainTimes:
    """A step of the training loop, the published way's with one edit, and the least that any step must do."""
    config = TrainConfig(edits=edits, rows=rows, max_tokens=tokens)
    accelerator = accelerator_on(model.device)
    editor = HyperNetwork.for_model(model)
    batch, one = random_step(model, edits, rows, tokens), random_step(model, 1, rows, tokens)
    with torch.no_grad():
        factor_bytes = _nbytes(editor.update(model, batch.edit_batch))
        objective = Objective(model, config, kept_features(model, batch))
        kept_of_one = kept_features(model, one)
    learner = Learner(editor, config, objective, accelerator)
    optimizer = torch.optim.RMSprop(editor.parameters(), lr=config.lr, centered=True)
    limits: list[Callable[[], object]] = [lambda: forward_and_back(model, model.model, batch.rows)]
    if model.device.type == "cuda":
        compiled = torch.compile(model.model)
        limits.append(lambda: forward_and_back(model, compiled, batch.rows))
        limits[-1]()
    ways: dict[str, list[Callable[[], object]]] = {
        "step": [lambda: learner.step([batch])],
        "reference": [lambda: published_step(editor, model, one, kept_of_one, optimizer)],
        "limit": limits,
    }
    start = time.perf_counter()
    for way in ways["step"] * 3:  # the first runs kernel by kernel, the second is recorded
        way()
    prepared = time.perf_counter() - start
    medians = {name: min(_median(way, model.device, repeats, tick) for way in found) for name, found in ways.items()}
    recorded = bool(learner.graphed.graphs)
    return TrainTimes(prepared=prepared, recorded=recorded, factor_bytes=factor_bytes, **medians)


# Evaluation


def bench_evaluate(
    model: TaskModel,
    edits: int | None = None,
    rows: int = 128,
    tokens: int = 16,
    repeats: int = 20,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, float | int | None]:
    """Rows a second under patches, and of the unedited model."""
    editor = HyperNetwork.for_model(model)
    edits = edits or editor.at_once(model)
    batch = random_rows(model, edits * rows, tokens)
    with torch.no_grad():
        deltas = editor.update(model, random_edits(model, edits, tokens))

        def under_patches() -> None:
            with edited(model.layers, deltas):
                model.logits(batch)

        ways = {"patched": under_patches, "unedited": lambda: model.logits(batch)}
        seconds = {name: _median(way, model.device, repeats, tick) for name, way in ways.items()}
    return {
        "edits": edits,
        "edits_per_second": edits / seconds["patched"],
        "reference_edits_per_second": None,  # the published way has no batches to compare with
        "speedup": None,
        "limit_edits_per_second": edits / seconds["unedited"],
        "fraction_of_limit": seconds["unedited"] / seconds["patched"],
        "rows_per_second": len(batch) / seconds["patched"],
        "unedited_rows_per_second": len(batch) / seconds["unedited"],
        "factor_bytes": _nbytes(deltas),
    }


# Time and memory


def _rates(edits: int, seconds: float, reference: float, limit: float) -> dict[str, float | int]:
    """Of edits that took so long, beside the seconds of one of them the published way, and the least for all."""
    return {
        "edits": edits,
        "edits_per_second": edits / seconds,
        "reference_edits_per_second": 1 / reference,
        "speedup": edits / seconds * reference,
        "limit_edits_per_second": edits / limit,
        "fraction_of_limit": limit / seconds,
    }


def _median(run: Callable[[], object], device: torch.device, repeats: int, tick: Callable[[], object]) -> float:
    """Of synchronised runs, after one that warms up."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        taken.append(_timed(run, device))
        tick()
    return statistics.median(taken[1:])


def _nbytes(deltas: dict[str, Delta]) -> int:
    return sum(t.numel() * t.element_size() for delta in deltas.values() for t in delta.tensors.values())


def _give_memory_back() -> None:
    """So that every run starts alike, as the first edit of a process does, whatever the way before it left behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other systems have none and need none
    if trim is not None:
        trim(0)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _give_memory_back()
    synchronise()
    start = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - start
