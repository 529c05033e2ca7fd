"""Comparisons of methods: cosines, weighted scores and grids of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import results
from safetensors.numpy import save_file

from factpatch.report import read_runs
from factpatch.report.compare import cosines, grid, position, weigh


def sketched(folder: Path, sketches: dict[str, list[float]], **about: Any) -> Path:
    results.write_evaluation(folder, bare=True, **about)
    array = np.array(list(sketches.values()), np.float32)
    save_file({"sketches": array}, folder / "details.safetensors", {"edits": json.dumps(list(sketches))})
    return folder


def test_cosines_over_shared_edits(tmp_path: Path) -> None:
    folders = [
        sketched(tmp_path / "a", {"1": [1, 0], "2": [1, 1], "3": [0, 2]}),
        sketched(tmp_path / "b", {"2": [2, 2], "1": [0, -3], "4": [5, 5]}),
        sketched(tmp_path / "c", {"1": [0, 0], "3": [0, -1]}),
        sketched(tmp_path / "d", {"1": [1, 0]}, model="another", fingerprint="f"),
        sketched(tmp_path / "e", {"1": [2, 0]}, model="its other name", fingerprint="f"),
    ]
    runs, _ = read_runs(folders)
    found = cosines(runs)
    assert np.diag(found) == pytest.approx(1)
    assert found[3, 4] == pytest.approx(1), "one model, whatever its folder is called"
    assert found[0, 1] == found[1, 0] == pytest.approx(0.5), "of edit 1 it is 0, of edit 2 it is 1"
    assert found[0, 2] == pytest.approx(-1), "an update of nothing has no direction"
    assert np.isnan([found[1, 2], found[0, 3]]).all(), "no edits, or no weights, in common"


def test_wins_under_random_weights() -> None:
    scores = np.array([[0.9, 0.8, 0.7], [0.8, 0.7, 0.6], [0.9, 0.8, 0.7], [1.0, 0.8, 0.6]])
    totals, wins = weigh(scores, seed=3)
    assert wins[0, 1] == 1, "better in all three"
    assert wins[1, 0] == 0
    assert wins[0, 2] == 0.5, "equal"
    assert wins[0, 3] == pytest.approx(0.5, abs=0.02), "a tenth more in one, a tenth less in another"
    assert wins + wins.T == pytest.approx(np.ones((4, 4)))
    assert totals[0].mean() == pytest.approx(0.8, abs=2e-3)
    assert (weigh(scores, seed=3)[0] == totals).all()


def test_the_position_of_a_weight() -> None:
    assert vars(position("model.decoder.layers.1.fc1")) == {"stack": "decoder", "block": 1, "kind": "fc1"}
    assert vars(position("bert.encoder.layer.3.output.dense.weight"))["kind"] == "output.dense"
    assert vars(position("encoder.block.0.layer.1.DenseReluDense.wi"))["kind"] == "layer.1.DenseReluDense.wi"
    assert vars(position("transformer.h.7.mlp.c_fc")) == {"stack": "transformer.h", "block": 7, "kind": "mlp.c_fc"}
    assert vars(position("lm_head"))["block"] is None


def test_a_grid_of_weights() -> None:
    found = grid(dict.fromkeys(["m.decoder.layers.0.cross.k", *results.bart_weights(11)], 1.0))
    assert found.rows[:2] + found.rows[10:12] == ["encoder 0", "encoder 1", "encoder 10", "decoder 0"]
    assert found.stacks == [11]
    assert {"k", "self_attn.k_proj", "fc1"} <= set(found.columns)
    assert np.isnan(found.values[0, found.columns.index("encoder_attn.k_proj")])
    bert = grid(dict.fromkeys(results.bert_weights(2), 1.0))
    assert bert.rows == ["0", "1"]
    assert bert.columns == ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
