"""Result folders that cannot be read are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import results
from safetensors.numpy import save_file

from factpatch.cli.report import report
from factpatch.errors import FileError, InputError
from factpatch.report import read_runs


def a_model(folder: Path) -> Path:
    """A fine-tuned model, which has a config and metrics too."""
    results.write_json(folder / "config.json", {"model_type": "bert"})
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


WRONG = {
    "nothing": (lambda f: f, "expected the output folder of factpatch evaluate .* found nothing; check the path"),
    "a file": (lambda f: results.write_evaluation(f) / "summary.json", "expected the output folder .* found a file"),
    "a model": (a_model, "expected the output folder .* found other files"),
    "a cut summary": (
        lambda f: results.spoil(results.write_evaluation(f) / "summary.json", '"layers": "all"', '"layers": '),
        "summary.json is not valid JSON .*with a new --output folder",
    ),
    "a list": (
        lambda f: results.spoil(results.write_evaluation(f) / "summary.json", "{", "["),
        "summary.json is not valid JSON",
    ),
    "a newer version": (
        lambda f: results.write_evaluation(f, version=99),
        r"written by a newer factpatch \(format 99, this one reads up to 1\); upgrade factpatch",
    ),
    "no task": (
        lambda f: results.spoil(results.write_evaluation(f) / "summary.json", '"task"', '"tusk"'),
        'expected a text in "task", found null',
    ),
    "no result": (
        lambda f: results.spoil(results.write_evaluation(f) / "summary.json", '"result"', '"r"'),
        'an object in "result", found null',
    ),
    "a word": (
        lambda f: results.spoil(results.write_evaluation(f) / "summary.json", '"retain": 0.9812', '"retain": "high"'),
        'a number or null in "retain", found "high"',
    ),
    "odd intervals": (
        lambda f: results.write_evaluation(f, result={"intervals": {"retain": 3}}),
        r"expected \[low, high\] for each metric",
    ),
    "cut metrics": (
        lambda f: results.spoil(results.write_training(f) / "metrics.jsonl", '"step": 150', '"step": '),
        "metrics.jsonl, line 3: expected a JSON object, found a syntax error .*; remove the line",
    ),
    "no step": (
        lambda f: results.spoil(results.write_training(f) / "metrics.jsonl", '"step": 100', '"step": null'),
        'metrics.jsonl, line 2: expected an object with a number in "step"',
    ),
    "no validation": (lambda f: results.write_training(f, 0), "has no validations yet"),
    "odd examples": (
        lambda f: results.spoil(results.write_evaluation(f) / "examples.json", '"edit"', '"e"'),
        r'examples.json: expected a list of \{"edit", "rows"\}',
    ),
    "an odd kind": (
        lambda f: results.spoil(results.write_evaluation(f) / "examples.json", '"unrelated"', '"other"'),
        'expected one of input, paraphrase, unrelated in "kind", found "other"',
    ),
    "an odd answer": (
        lambda f: results.spoil(results.write_evaluation(f) / "examples.json", '"REFUTES"', "5"),
        'examples.json: expected a list of texts in "before"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders(tmp_path: Path, case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(InputError, match=message) as caught:
        report([make(tmp_path / "run")], tmp_path / "out", None, 0, True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_damaged_details(tmp_path: Path) -> None:
    folder = results.write_evaluation(tmp_path / "run")
    (folder / "details.safetensors").write_bytes(b"no tensors")
    with pytest.raises(
        FileError, match=r"details.safetensors cannot be read .*remove it to report without its figures"
    ):
        read_runs([folder])
    save_file({"magnitudes": np.ones(3, np.float32)}, folder / "details.safetensors", {"weights": '["a"]'})
    with pytest.raises(FileError, match=r"details\.safetensors"):
        read_runs([folder])


@pytest.mark.parametrize(
    ("key", "value"),
    [("bound", []), ("loop", "x"), ("together", [1, "x"]), ("options", 1), ("model", 3), ("seed", None)],
)
def test_conditions_of_another_type(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f'in "{key}"'):
        read_runs([results.write_evaluation(tmp_path / "run", **{key: value})])


@pytest.mark.parametrize("curve", [1, "x", {"a": 1}])
def test_a_curve_that_is_no_list(tmp_path: Path, curve: Any) -> None:
    with pytest.raises(InputError, match='expected a list in "curve"'):
        read_runs([results.write_evaluation(tmp_path / "run", result={"curve": curve})])


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"scores_before": np.ones((2, 2), np.float32)}, {}),
        ({"magnitudes": np.ones((), np.float32)}, {}),
        ({"magnitudes": np.ones(1, np.float32)}, {"weights": "[" * 3000}),
        ({"magnitudes": np.ones(1, np.float32)}, {"weights": "1"}),
    ],
)
def test_details_of_another_form(tmp_path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    folder = results.write_evaluation(tmp_path / "run")
    save_file(tensors, folder / "details.safetensors", metadata)
    with pytest.raises(FileError, match="cannot be read"):
        read_runs([folder])
