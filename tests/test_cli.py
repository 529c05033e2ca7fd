"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, loud_editor

from factpatch.models import load_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder and an editor folder, as training leaves them."""
    folder = tmp_path_factory.mktemp("home")
    model = tiny.build("bert")
    model.save(folder / "model")
    loud_editor(model).save(folder / "editor")
    return folder


@pytest.fixture
def edit(run, home: Path):
    def command(*arguments: object, model: Path = home / "model", editor: Path = home / "editor") -> Ran:
        return run("edit", "--model", model, "--editor", editor, "--device", "cpu", *arguments)

    return command


def one_edit(home: Path) -> tuple[str, str, str]:
    """An input, what the model says to it, and another label."""
    model = load_model(home / "model", "cpu")
    before, other = model.candidates([QUESTIONS[0]], 2)[0]
    return QUESTIONS[0], before, other


def test_edit_show_apply(edit, run, home: Path, tmp_path: Path) -> None:
    text, before, target = one_edit(home)
    patch = tmp_path / "p.safetensors"
    result = edit("--input", text, "--target", target, "--save", patch, "--json").json
    assert {"before", "after", "target", "success", "patch"} <= result.keys()
    assert (result["before"], result["target"], result["patch"]) == (before, target, str(patch))
    assert result["success"] == (result["after"] == target)

    shown = run("patch", "show", patch, "--json").json
    assert shown["edits"] == [{"x": text, "a": target, "y": before}]
    assert len(shown["layers"]) == 12
    assert {"weight", "shape", "rank", "norm"} <= shown["layers"][0].keys()
    table = run("patch", "show", patch)
    assert table.code == 0
    assert "12 weights" in " ".join(table.out.split())

    applied = run("patch", "apply", patch, "--model", home / "model", "--output", tmp_path / "new", "--device", "cpu")
    assert applied.code == 0, applied.err
    assert load_model(tmp_path / "new", "cpu").predict([text]) == [result["after"]]
    again = run("patch", "apply", patch, "--model", home / "model", "--output", tmp_path / "new")
    assert again.code == 1
    assert "in use" in again.err
    wrong_base = run("patch", "apply", patch, "--model", tmp_path / "new", "--output", tmp_path / "newer")
    assert wrong_base.code == 1
    assert "made for weights" in wrong_base.err
    assert not (tmp_path / "newer").exists()


def test_edit_many_facts(edit, home: Path, tmp_path: Path) -> None:
    model = load_model(home / "model", "cpu")
    lines = [{"input": x, "target": model.candidates([x], 2)[0][1]} for x in QUESTIONS]
    facts = tmp_path / "facts.jsonl"
    known = {"input": QUESTIONS[0], "target": model.predict(QUESTIONS[:1])[0]}
    facts.write_text("\n".join(json.dumps(line) for line in [*lines, known]) + "\nnonsense\n")
    refused = edit("--facts", facts, "--save", tmp_path / "patches")
    assert refused.code == 1
    assert "line 5" in refused.err
    assert not (tmp_path / "patches").exists()
    result = edit("--facts", facts, "--save", tmp_path / "patches", "--skip-bad", "--json").json
    assert result["bad"] == 2
    assert [e["input"] for e in result["edits"]] == QUESTIONS
    assert len(list((tmp_path / "patches").iterdir())) == 3
    assert 0 <= result["success"] <= 1


@pytest.mark.parametrize("loop", [["--loop"], ["--loop", "3"], ["--loop=2"]])
def test_loop_takes_a_number_or_none(edit, home: Path, loop: list[str]) -> None:
    text, _, target = one_edit(home)
    for arguments in ([*loop, "--input", text, "--target", target], ["--input", text, "--target", target, *loop]):
        assert edit(*arguments).code == 0


def test_bad_input_is_one_line_and_exit_1(edit, run, home: Path, tmp_path: Path) -> None:
    text, before, target = one_edit(home)
    cut = tmp_path / "cut.safetensors"
    assert edit("--input", text, "--target", target, "--save", cut).code == 0
    cut.write_bytes(cut.read_bytes()[:-9])
    other = tiny.build("bert", seed=3)
    other.save(tmp_path / "other")
    cases = {
        "empty": edit("--input", " ", "--target", target),
        "at most 36 tokens": edit("--input", "capital " * 99, "--target", target),
        "already says": edit("--input", text, "--target", before),
        "no label": edit("--input", text, "--target", "perhaps"),
        "trained for weights": edit("--input", text, "--target", target, model=tmp_path / "other"),
        "no readable editor": edit("--input", text, "--target", target, editor=tmp_path),
        "expected a model folder": edit("--input", text, "--target", target, model=tmp_path / "none"),
        "not a readable patch": run("patch", "show", cut),
        "expected a device": run("patch", "show", cut, "--device", "potato"),
    }
    for reason, result in cases.items():
        assert result.code == 1, reason
        assert reason in result.err
        assert result.err.count("\n") == 1, result.err
        assert not result.out


def test_no_gpu_where_one_was_asked_for(edit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text, _, target = one_edit(home)
    result = edit("--input", text, "--target", target, "--device", "cuda")
    assert result.code == 1
    assert result.err == "error: cuda was asked for, but this machine has no usable CUDA GPU; use --device cpu\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    ],
)
def test_a_full_gpu_is_one_line(edit, home: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("factpatch.editors.HyperNetwork.propose", full)
    text, _, target = one_edit(home)
    result = edit("--input", text, "--target", target)
    assert result.code == 1
    assert result.err.startswith("error: out of memory; ")
    assert result.err.count("\n") == 1


def test_wrong_usage_is_exit_2(edit, run) -> None:
    assert run("edit").code == 2
    assert edit("--input", "x").code == 2
    assert edit("--input", "x", "--target", "y", "--facts", "f").code == 2
    assert run("patch", "mend").code == 2
    assert run("bench", "edit", "--shape", "gpt-9").code == 2
    assert run("revise", "--model", "m", "--data", "d", "--output", "o", "--precision", "fp7").code == 2
    for command in ("fit", "train"):
        both = run(command, "--model", "m", "--train", "t", "--output", "o", "--steps", "1", "--minutes", "1")
        assert both.code == 2
        assert "not both" in both.err
    assert edit("--input", "x", "--target", "y", "--loop", "0").code == 2


def test_help_has_a_runnable_example() -> None:
    data = "demo,split,fit,paraphrase,revise,train,evaluate,report,edit"
    for command in f"{data},patch show,patch apply,bench edit,bench train,bench evaluate".split(","):
        shown = subprocess.run(
            [sys.executable, "-m", "factpatch", *command.split(), "--help"], capture_output=True, text=True, check=True
        )
        assert f"Example: factpatch {command}" in " ".join(shown.stdout.replace("│", " ").split())


def test_version(run) -> None:
    from factpatch import __version__

    assert run("--version").out.strip() == __version__


def test_text_in_brackets_is_shown_as_it_is(edit, run, home: Path, tmp_path: Path) -> None:
    target = load_model(home / "model", "cpu").candidates(["a [/b] [red] lake"], 2)[0][1]
    shown = edit("--input", "a [/b] [red] lake", "--target", target, "--save", tmp_path / "p.safetensors")
    assert shown.code == 0
    assert "[/b]" in shown.out
    assert "a [/b] [red] lake" in run("patch", "show", tmp_path / "p.safetensors").out
