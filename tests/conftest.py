from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import fact_checker, write_revisions

from factpatch.cli import main
from factpatch.editors import EditorConfig, HyperNetwork
from factpatch.facts import FactEdit
from factpatch.models import TaskModel, load_model

QUESTIONS = [
    "what is the capital of burundi ?",
    "who leads france ?",
    "where do people speak rundi and swahili in africa ?",
]


# Tiny models gain nothing from more threads, threads that wait for each other lose a lot, and a process that a test
# forks would wait for threads that it does not have. Commands keep a number that is set.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

if tiny.DEVICE != "cpu":  # so that rounding errors are small enough for comparisons
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision = lambda precision: None


@pytest.fixture(params=list(tiny.ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(architecture: str) -> TaskModel:
    return tiny.build(architecture)


@pytest.fixture
def editor(model: TaskModel) -> HyperNetwork:
    return loud_editor(model)


_edits: dict[str, list[FactEdit]] = {}


@pytest.fixture
def edits(architecture: str, model: TaskModel) -> list[FactEdit]:
    """Three edits of unequal length, found once: all models of an architecture are alike, and asking them is slow."""
    if architecture not in _edits:
        _edits[architecture] = model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in QUESTIONS])
    return list(_edits[architecture])


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fact_checker(tmp_path_factory.mktemp("models") / "checker")


@pytest.fixture(scope="module")
def claims(checker: Path) -> Path:
    return write_revisions(checker.parent / "claims.jsonl", load_model(checker, "cpu"), 60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with three other labels and with dropout, to start a training from."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny.build("bert", initializer_range=0.05).save(folder)
    return folder


def loud_editor(model: TaskModel) -> HyperNetwork:
    """An untrained editor whose updates are large enough to change the model's answers."""
    torch.manual_seed(1)
    editor = HyperNetwork.for_model(model, EditorConfig(width=64, bottleneck=16, lstm=8))
    with torch.no_grad():
        for group in editor.groups.values():
            group.up.g.mul_(10)
            group.up.b.mul_(30)
    return editor


def weights_of(model: TaskModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.model.state_dict().items()}


def assert_untouched(model: TaskModel, before: dict[str, torch.Tensor]) -> None:
    after = model.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.model.parameters())
    assert not model.model.training
    for module in model.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module), "an edited layer's own forward is back"


class Ran:
    """The exit status and the output of a command."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1, "one JSON object and nothing else on stdout"
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `factpatch` with the given arguments."""

    def command(*arguments: object) -> Ran:
        capsys.readouterr()  # output of the test itself, which is not the command's
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = stop.value.code
        return Ran(code if isinstance(code, int) else 0, captured.out, captured.err)

    return command
