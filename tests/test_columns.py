"""Groups of rows of similar length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from conftest import loud_editor
from samples import revisions

from factpatch.data.revisions import teachable
from factpatch.training import TrainConfig
from factpatch.training.batcher import Batcher
from factpatch.training.columns import group_columns
from factpatch.training.graphs import tensors_of
from factpatch.training.objective import Objective
from factpatch.training.sampler import Sampler
from factpatch.training.unedited import unedited_outputs

EDITS = np.array([[9, 12], [3, 3]])  # the longest text and target of an edit's input and of its paraphrase


def lists(edit_widths: np.ndarray, texts: list[int], targets: list[int], groups: int, cost: float) -> list[list[int]]:
    found = group_columns(edit_widths, np.array([texts, targets]), groups, cost)
    return [group.tolist() for group in found]


def test_long_inputs_run_with_the_edits() -> None:
    texts, targets = [5, 5, 6, 12, 30, 5], [1, 1, 1, 1, 3, 1]
    assert lists(EDITS, texts, targets, 1, 0) == [[0, 1, 2, 3, 4, 5]]
    assert lists(EDITS, texts, targets, 2, 0) == [[3, 4], [0, 1, 2, 5]]
    assert lists(EDITS, texts, targets, 3, 0) == [[], [3, 4], [0, 1, 2, 5]], "or the edits run alone"
    assert lists(EDITS, texts, targets, 3, 40) == [[3, 4], [0, 1, 2, 5]]
    assert lists(EDITS, texts, targets, 3, 1000) == [[0, 1, 2, 3, 4, 5]], "another pass would cost more than padding"


def test_no_control_inputs() -> None:
    assert lists(EDITS, [], [], 3, 0) == [[]]


def test_the_choice_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        texts, targets = rng.integers(3, 30, 6), rng.integers(1, 6, 6)
        order = np.argsort(-(texts + targets), kind="stable")

        def tokens(
            cuts: tuple[int, ...], texts: np.ndarray = texts[order], targets: np.ndarray = targets[order]
        ) -> int:
            """All tokens of an edit, when the columns are cut at these places."""
            total = 0
            for number, (start, end) in enumerate(pairwise((0, *cuts, 6))):
                wide = [*texts[start:end], *(EDITS[0] if number == 0 else [])]
                answers = [*targets[start:end], *(EDITS[1] if number == 0 else [])]
                total += len(wide) * (max(wide) + max(answers)) if wide else 0
            return total

        found = group_columns(EDITS, np.array([texts, targets]), 3, 0)
        cuts = tuple(np.cumsum([len(group) for group in found])[:-1])
        assert tokens(cuts) == min(tokens((a, b)) for a in range(7) for b in range(a, 7))


@pytest.mark.parametrize("name", ["bert", "bart", "gpt2"])
def test_groups_of_a_batch(name: str) -> None:
    """All groups together have each edit's rows, with less padding than one group."""
    model = tiny.build(name)
    known = revisions(model, 40)
    config = TrainConfig(edits=32, rows=12)
    batcher, sampler = Batcher(model, loud_editor(model), known, config), Sampler(known, config)
    sampler.sort_pool(batcher.control_lengths(sampler.pool))
    plan = sampler.plan(0)
    whole = batcher.batch(plan, 32)
    batcher.group_columns([plan])
    grouped = batcher.batch(plan, 32)
    assert len(grouped.row_groups) > 1

    def texts(rows: tuple) -> list[str]:
        return sorted(text for one in rows for text in model.tokenizer.batch_decode(one.inputs["input_ids"], True))

    assert texts(grouped.row_groups) == texts(whole.row_groups)
    assert (
        sum(r.inputs["input_ids"].numel() for r in grouped.row_groups) < whole.row_groups[0].inputs["input_ids"].numel()
    )
    for name in ("edit_targets", "control_targets"):
        mine, expected = getattr(grouped, name), getattr(whole, name)
        assert sorted(zip(mine.labels.tolist(), mine.weights.tolist(), strict=True)) == sorted(
            zip(expected.labels.tolist(), expected.weights.tolist(), strict=True)
        )


@pytest.mark.parametrize("name", ["bert", "bart", "gpt2"])
def test_sizes_for_recorded_steps(name: str) -> None:
    """Sizes that never shrink soon stop changing, and the larger batches have the same loss and constraints."""
    model = tiny.build(name)
    known = teachable(model, revisions(model, 40))
    config = TrainConfig(edits=16, rows=8)
    editor, sampler = loud_editor(model), Sampler(known, config)
    exact, rounded = (Batcher(model, editor, known, config) for _ in range(2))
    for sizes in (rounded.edit_sizes, *rounded.group_sizes):
        sizes.few = True
    for batcher in (exact, rounded):
        batcher.column_groups = [np.array([4, 5]), np.array([0, 1]), np.array([2, 3])]
    objective = Objective(model, config, unedited_outputs(model, exact, sampler.pool))
    shapes = []
    for step in range(40):
        plan = sampler.plan(step)
        batch = rounded.batch(plan, len(plan))
        shapes.append([tensor.shape for tensor in tensors_of(batch)])
        if step < 2:
            ours, expected = objective(editor, batch), objective(editor, exact.batch(plan, len(plan)))
            torch.testing.assert_close(ours.loss, expected.loss, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours.constraints, expected.constraints, rtol=1e-4, atol=1e-6)
    assert all(later == shapes[-1] for later in shapes[20:])
