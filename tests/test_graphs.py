"""Steps that are recorded as CUDA graphs give the same numbers as others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import answerer, fact_checker, read_lines, write_revisions
from torch import Tensor
from training_runs import SMALL

from factpatch.models import load_model
from factpatch.training import Train, TrainConfig
from factpatch.training.graphs import Graphed, tensors_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records on a CUDA GPU only")


@dataclass(frozen=True)
class Inner:
    numbers: Tensor
    nothing: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    first: Tensor
    inner: Inner
    named: dict[str, Tensor]


def batch(size: int, device: str = "cpu") -> Batch:
    # Numbers are drawn on the CPU: a recording that fails leaves a GPU's generator in a state of its own.
    first, numbers = torch.randn(size, 3).to(device), torch.randn(size).to(device)
    return Batch(first, Inner(numbers), {"a": torch.ones(2, device=device)})


def weigh(one: Batch) -> tuple[Tensor, ...]:
    return ((one.first.sum(1) * one.inner.numbers).sum(), one.named["a"] + 1)


def test_tensors_of_a_batch() -> None:
    one = batch(4)
    assert [tensor.data_ptr() for tensor in tensors_of(one)] == [
        tensor.data_ptr() for tensor in (one.first, one.inner.numbers, one.named["a"])
    ]


def test_on_a_cpu_it_is_the_function() -> None:
    one = batch(4)
    graphed = Graphed(weigh)
    for _ in range(3):
        assert torch.equal(graphed(one)[0], weigh(one)[0])
    assert not graphed.graphs


@needs_gpu
def test_recorded_shapes_give_the_same() -> None:
    """All graphs write to the same memory, because an editor's gradients are large."""
    graphed = Graphed(weigh)
    addresses = []
    for size in (4, 4, 5, 4, 5, 5, 4):
        one = batch(size, "cuda")
        for found, wanted in zip(graphed(one), weigh(one), strict=True):
            torch.testing.assert_close(found, wanted)
        addresses.append(graphed(one)[0].data_ptr())
    assert len(graphed.graphs) == 2
    assert len(set(addresses[-2:])) == 1


@needs_gpu
def test_what_cannot_be_recorded_still_runs() -> None:
    def waits(one: Batch) -> tuple[Tensor, ...]:
        return (one.first * one.inner.numbers.sum().item(),)

    graphed = Graphed(waits)
    for _ in range(3):
        one = batch(4, "cuda")
        torch.testing.assert_close(graphed(one)[0], waits(one)[0])
    assert graphed.unrecordable


@needs_gpu
@pytest.mark.parametrize("make", [fact_checker, answerer])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "rmsprop"},
        {"optimizer": "adam"},
        {"ridge": 1.0},
        {"ema": 0.9, "others": ("unsure", "near")},
        {"editor": replace(SMALL, states=True)},
    ],
    ids=str,
)
def test_a_run_has_the_same_curve_recorded_or_not(
    make: Callable[[Path], Path], options: dict[str, Any], tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    train = write_revisions(tmp_path / "train.jsonl", load_model(model, "cpu"), 60)
    sizes: dict[str, Any] = {"edits": 6, "rows": 6, "validations": 4, "validation_edits": 4, "validation_inputs": 4}
    config = TrainConfig(**{"steps": 40, "precision": "fp32", "editor": SMALL, **sizes, **options})
    curves = []
    for graphs in (True, False):
        run = Train(replace(config, graphs=graphs), load_model(model, "cuda"), tmp_path / f"run-{graphs}")
        run.run(train)
        curves.append([line["loss"] for line in read_lines(tmp_path / f"run-{graphs}" / "metrics.jsonl")])
        if graphs:
            assert run.learner.graphed.graphs
    print(json.dumps(curves))
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
