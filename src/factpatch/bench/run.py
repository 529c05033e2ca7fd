"""Benchmarks of editing, training and evaluation, each compared with the frozen model alone on the same rows.

Editing and training are also compared with the published implementation of KnowledgeEditor (De Cao et al., 2021).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.bench.shapes import (
    ANSWER_TOKENS,
    kept_features,
    random_edits,
    random_fact,
    random_rows,
    random_step,
    split_step,
)
from factpatch.bench.ways import (
    backward_and_answer,
    edit_and_answer,
    forward_and_back,
    frozen_alone,
    propose_and_run,
    published_edit,
    published_step,
)
from factpatch.deltas import Delta
from factpatch.editors.hypernetwork import HyperNetwork
from factpatch.engine import edited
from factpatch.models import Causal, TaskModel
from factpatch.processes import accelerator_on
from factpatch.training import TrainConfig
from factpatch.training.batcher import StepBatch
from factpatch.training.objective import Objective
from factpatch.training.step import Learner

Progress = Callable[[float], object]  # called with the share that is done
Way = Callable[[], object]  # one of the implementations that are timed


def _nothing(*_: object) -> None:
    """Stands for a callback that is not needed."""


# Editing


@torch.no_grad()
def bench_edit(
    model: TaskModel, edits: int, rows: int, tokens: int, repeats: int, on_progress: Progress = _nothing
) -> dict[str, object]:
    """Times proposing edits and one forward pass of `rows` rows per edit, without an optimizer.

    The rates are those of a process in a steady state. On a CPU, "memory_given_back" has the rates that result if free
    memory is given back to the operating system before each run, as if each run were the first of its process.
    Allocating the memory again costs most in the published implementation, because of its dense updates.
    """
    editor = HyperNetwork.for_model(model)
    many, one = random_edits(model, edits, tokens), random_edits(model, 1, tokens)
    many_rows, one_rows = random_rows(model, edits * rows, tokens), random_rows(model, rows, tokens)
    factor_bytes = _nbytes(editor.update(model, many))
    ways: dict[str, Way] = {
        "batch": lambda: propose_and_run(editor, model, many, many_rows),
        "one": lambda: propose_and_run(editor, model, one, one_rows),
        "reference": lambda: published_edit(editor, model, one, one_rows),
        "limit": lambda: frozen_alone(model, many, many_rows),
    }
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if model.device.type == "cpu" else None  # glibc has it
    preparations: list[Way] = [_nothing] if trim is None else [_nothing, lambda: trim(0)]
    rates: list[dict[str, float | int]] = []
    for number, before_run in enumerate(preparations):
        report = _part(on_progress, number, len(preparations))
        seconds = _medians(ways, model.device, repeats, report, before_run)
        alone = {"one_edit_per_second": 1 / seconds["one"], "one_edit_speedup": seconds["reference"] / seconds["one"]}
        rates.append(_rates(edits, seconds["batch"], seconds["reference"], seconds["limit"]) | alone)
    answering = _answering(model, editor, tokens, repeats) if isinstance(model, Causal) else {}
    return {**rates[0], **answering, "memory_given_back": rates[1] if trim else None, "factor_bytes": factor_bytes}


def _answering(model: Causal, editor: HyperNetwork, tokens: int, repeats: int) -> dict[str, float]:
    """Times `propose` for one edit with a generated answer, and the same answer and a backward pass without an edit."""
    model.limit_answers(ANSWER_TOKENS)
    edit = random_fact(model, tokens)
    ways: dict[str, Way] = {
        "edited": lambda: edit_and_answer(editor, model, edit),
        "plain": lambda: backward_and_answer(model, edit),
    }
    seconds = _medians(ways, model.device, repeats, _nothing)
    return {
        "edit_and_answer_seconds": seconds["edited"],
        "backward_and_answer_seconds": seconds["plain"],
        "answer_ratio": seconds["edited"] / seconds["plain"],
    }


# Training


@no_cudnn_attention()
@tensor_core_products()
def bench_train(
    model: TaskModel, edits: int, rows: int, tokens: int, repeats: int, on_progress: Progress = _nothing
) -> dict[str, float | int | None]:
    """Times a training step, a step of the published implementation with one edit, and the minimum work of a step."""
    config = TrainConfig(edits=edits, rows=rows, max_tokens=tokens)
    accelerator = accelerator_on(model.device)
    editor = HyperNetwork.for_model(model)
    whole, one = random_step(model, edits, rows, tokens), random_step(model, 1, rows, tokens)
    with torch.no_grad():
        features_of_one = kept_features(model, one)
        objective = Objective(model, config, kept_features(model, whole))
    learner = Learner(editor, config, objective, accelerator)
    optimizer = torch.optim.RMSprop(editor.parameters(), lr=config.lr, centered=True)
    on_gpu = model.device.type == "cuda"
    start = time.perf_counter()
    parts = _fitting_parts(learner, whole, edits)  # runs the step kernel by kernel
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    for _ in range(2):  # the first of these is recorded as a CUDA graph
        learner.step(parts)
    prepared = time.perf_counter() - start
    # Read here, because replaying a recorded step allocates nothing.
    memory = torch.cuda.max_memory_allocated(model.device) if on_gpu else None
    ways: dict[str, Way] = {
        "step": lambda: learner.step(parts),
        "reference": lambda: published_step(editor, model, one, features_of_one, optimizer),
        "limit": lambda: [forward_and_back(model, model.model, rows) for part in parts for rows in part.row_groups],
    }
    if on_gpu:
        compiled = torch.compile(model.model)
        ways["compiled_limit"] = lambda: [
            forward_and_back(model, compiled, rows) for part in parts for rows in part.row_groups
        ]
    medians: dict[str, float] = {}
    recorded = bool(learner.graphed.graphs)
    for number, (name, way) in enumerate(ways.items()):  # one by one, because training does not alternate
        medians |= _medians({name: way}, model.device, repeats, _part(on_progress, number, len(ways)))
        if name == "step" and on_gpu:
            learner.graphed.release()  # the other ways need the memory
    limit = min(medians["limit"], medians.get("compiled_limit", medians["limit"]))
    with torch.no_grad():
        factor_bytes = _nbytes(editor.update(model, parts[0].edit_batch)) * len(parts)
    return {
        **_rates(edits, medians["step"], medians["reference"], limit),
        "prepare_seconds": prepared,
        "recorded": recorded,
        "parts": len(parts),
        "memory_bytes": memory,
        "model_parameters": model.model.num_parameters(),
        "editor_parameters": sum(parameter.numel() for parameter in editor.parameters()),
        "factor_bytes": factor_bytes,
    }


def _fitting_parts(learner: Learner, batch: StepBatch, edits: int) -> list[StepBatch]:
    """Splits a step into parts that fit into the GPU's memory, by doubling their number as training does."""
    parts = 1
    while True:
        batches = split_step(batch, edits, parts)
        try:
            learner.step(batches)
            return batches
        except torch.cuda.OutOfMemoryError:
            if learner.graphed.release():
                continue
            if parts >= edits:
                raise
        torch.cuda.empty_cache()
        parts *= 2


# Evaluation


def bench_evaluate(
    model: TaskModel, edits: int | None, rows: int, tokens: int, repeats: int, on_progress: Progress = _nothing
) -> dict[str, float | int | None]:
    """Times rows that run under patches, and the same rows through the unedited model."""
    editor = HyperNetwork.for_model(model)
    edits = edits or editor.edits_per_batch(model)
    batch = random_rows(model, edits * rows, tokens)
    with torch.no_grad():
        deltas = editor.update(model, random_edits(model, edits, tokens))

        def run_patched() -> None:
            with edited(model.layers, deltas):
                model.logits(batch)

        ways: dict[str, Way] = {"patched": run_patched, "unedited": lambda: model.logits(batch)}
        seconds = _medians(ways, model.device, repeats, on_progress)
    return {
        "edits": edits,
        "edits_per_second": edits / seconds["patched"],
        "reference_edits_per_second": None,  # the published implementation has no batches of edits
        "speedup": None,
        "limit_edits_per_second": edits / seconds["unedited"],
        "fraction_of_limit": seconds["unedited"] / seconds["patched"],
        "rows_per_second": len(batch) / seconds["patched"],
        "unedited_rows_per_second": len(batch) / seconds["unedited"],
        "factor_bytes": _nbytes(deltas),
    }


# Time and memory


def _rates(edits: int, seconds: float, reference: float, limit: float) -> dict[str, float | int]:
    """Returns the rates of `edits` edits in `seconds`; `reference` is the time for one edit, `limit` for all."""
    return {
        "edits": edits,
        "edits_per_second": edits / seconds,
        "reference_edits_per_second": 1 / reference,
        "speedup": edits / seconds * reference,
        "limit_edits_per_second": edits / limit,
        "fraction_of_limit": limit / seconds,
    }


def _medians(
    ways: dict[str, Way], device: torch.device, repeats: int, on_progress: Progress, before_run: Way = _nothing
) -> dict[str, float]:
    """Returns median seconds of each way. Ways take turns, so that noise affects all; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(repeats + 1):
        for position, (name, way) in enumerate(ways.items(), start=1):
            before_run()
            seconds[name].append(_timed(way, device))
            on_progress((round_number + position / len(ways)) / (repeats + 1))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def _part(on_progress: Progress, number: int, parts: int) -> Progress:
    """Reports the progress of one of several equal parts as that of the whole."""
    return lambda share: on_progress((number + share) / parts)


def _timed(way: Way, device: torch.device) -> float:
    """Returns the seconds that one run takes, including work that the device has only queued."""
    wait_for = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait_for(device)
    start = time.perf_counter()
    way()
    wait_for(device)
    return time.perf_counter() - start


def _nbytes(deltas: dict[str, Delta]) -> int:
    return sum(t.numel() * t.element_size() for delta in deltas.values() for t in delta.tensors.values())
