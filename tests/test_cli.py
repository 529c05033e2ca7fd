"""The command line: edit, ask, patch, and what all commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, loud_editor
from samples import texts

from factpatch import cli
from factpatch.cli import common
from factpatch.editors import Looped
from factpatch.editors.finetune import FineTune
from factpatch.editors.looped import MAX_UPDATES
from factpatch.facts import FactEdit
from factpatch.models import TaskModel, load_model
from factpatch.patch import Patch


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
    """An input, the model's answer to it, and another label."""
    model = load_model(home / "model", "cpu")
    before, other = model.candidates([QUESTIONS[0]], 2)[0]
    return QUESTIONS[0], before, other


def test_edit_show_apply(edit, run, home: Path, tmp_path: Path) -> None:
    text, before, target = one_edit(home)
    patch = tmp_path / "p.safetensors"
    result = edit("--input", text, "--target", target, "--save", patch, "--keep-failed", "--json").json
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

    applied = run("patch", "apply", patch, "--model", home / "model", "--output", tmp_path / "new", "--force")
    assert applied.code == 0, applied.err
    assert load_model(tmp_path / "new", "cpu").predict([text]) == [result["after"]]
    again = run("patch", "apply", patch, "--model", home / "model", "--output", tmp_path / "new")
    assert again.code == 1
    assert "in use" in again.err
    wrong_base = run("patch", "apply", patch, "--model", tmp_path / "new", "--output", tmp_path / "newer")
    assert wrong_base.code == 1
    assert "made for weights" in wrong_base.err
    assert not (tmp_path / "newer").exists()


def test_edit_with_inputs_to_protect(edit, home: Path, tmp_path: Path) -> None:
    text, _, target = one_edit(home)
    others = tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps({"input": question}) + "\n" for question in QUESTIONS[1:]))
    common = ["--input", text, "--target", target, "--max-updates", 1, "--keep-failed", "--json"]
    plain, protected = edit(*common).json, edit(*common, "--others", others).json
    assert protected["rank"] < plain["rank"], "one row per token, and none for the bias"
    assert protected["norm"] != plain["norm"]


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
    result = edit("--facts", facts, "--save", tmp_path / "patches", "--keep-failed", "--skip-bad", "--json").json
    assert result["bad"] == 2
    assert [e["input"] for e in result["edits"]] == QUESTIONS
    assert len(list((tmp_path / "patches").iterdir())) == 3
    assert result["failed"] == sum(not e["success"] for e in result["edits"])
    assert result["success"] == 1 - result["failed"] / 3


def test_a_used_folder_is_refused_and_left_alone(edit, home: Path, tmp_path: Path) -> None:
    text, _, target = one_edit(home)
    facts = tmp_path / "facts.jsonl"
    facts.write_text(json.dumps({"input": text, "target": target}))
    patches = tmp_path / "patches"
    assert edit("--facts", facts, "--save", patches, "--keep-failed").code == 0
    before = {file: file.read_bytes() for file in patches.iterdir()}
    refused = edit("--facts", facts, "--save", patches, "--keep-failed")
    assert refused.code == 1
    assert "in use" in refused.err
    assert {file: file.read_bytes() for file in patches.iterdir()} == before


class Stubborn(Looped):
    """Makes patches that change nothing, except for the edits of some questions."""

    asked: ClassVar[list[int]] = []
    succeeds: ClassVar[tuple[str, ...]] = ()

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        self.asked.append(self.updates)
        return [
            fine_tuned(model, edit) if edit.x in self.succeeds else Patch({}, model.fingerprint, "stub", (edit,))
            for edit in edits
        ]


def test_an_edit_loops_unless_told_otherwise(edit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factpatch.editors.Looped", Stubborn)
    monkeypatch.setattr(Stubborn, "asked", asked := [])
    text, _, target = one_edit(home)
    edit("--input", text, "--target", target)
    edit("--input", text, "--target", target, "--max-updates", 1)
    assert asked == [MAX_UPDATES, 1]
    assert common.MAX_UPDATES == MAX_UPDATES


def test_a_failed_edit_is_not_saved_unless_asked_to(edit, home: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("factpatch.editors.Looped", Stubborn)
    text, _, target = one_edit(home)
    given = ("--input", text, "--target", target, "--save", tmp_path / "p.safetensors")
    failed = edit(*given, "--json")
    assert failed.code == 1
    assert json.loads(failed.out)["patch"] is None
    assert not (tmp_path / "p.safetensors").exists()
    steps = [failed.err.index(step) for step in ("failed", "--max-updates 10", "another wording", "larger model")]
    assert steps == sorted(steps)
    assert "NO" in edit(*given).out
    kept = edit(*given, "--keep-failed")
    assert kept.code == 0
    (saved,) = [line for line in kept.out.splitlines() if line.startswith("Saved")]
    assert "failed" in saved
    assert (tmp_path / "p.safetensors").exists()


def test_of_many_edits_only_those_that_succeed_are_saved(edit, home: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("factpatch.editors.Looped", Stubborn)
    monkeypatch.setattr(Stubborn, "succeeds", (QUESTIONS[1],))
    model = load_model(home / "model", "cpu")
    facts = tmp_path / "facts.jsonl"
    lines = [{"input": x, "target": tiny.other_answer(model, x)} for x in QUESTIONS]
    facts.write_text("\n".join(map(json.dumps, lines)))
    result = edit("--facts", facts, "--save", tmp_path / "patches", "--json").json
    assert (result["failed"], [e["success"] for e in result["edits"]]) == (2, [False, True, False])
    assert [file.name for file in (tmp_path / "patches").iterdir()] == ["00002.safetensors"]
    assert "2 of 3 edits failed" in edit("--facts", facts).err
    monkeypatch.setattr(Stubborn, "succeeds", ())
    assert edit("--facts", facts).code == 1, "none succeeded"


def fine_tuned(model: TaskModel, edit: FactEdit) -> Patch:
    """A patch that succeeds."""
    (patch,) = FineTune().propose(model, [edit])
    return patch


def test_a_model_whose_patched_facts_do_not_hold_is_not_written(run, home: Path, tmp_path: Path) -> None:
    model = load_model(home / "model", "cpu")
    text, before, target = one_edit(home)
    third = next(label for label in model.candidates([text], 3)[0] if label not in (before, target))
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "other")]
    for file, answer in zip(files, (target, third), strict=True):
        fine_tuned(model, FactEdit(text, answer)).save(file)
    given = ("--model", home / "model", "--output", tmp_path / "new")
    both = run("patch", "apply", *files, *given)
    assert both.code == 1
    assert "1 of 2 facts do not hold" in both.err
    assert "factpatch patch merge" in both.err
    assert not (tmp_path / "new").exists()
    forced = run("patch", "apply", *files, *given, "--force", "--json")
    assert (forced.json["facts"], forced.json["lost"]) == (2, 1)
    assert "1 of 2 facts do not hold" in forced.err
    one = run("patch", "apply", files[0], "--model", home / "model", "--output", tmp_path / "single", "--json").json
    assert (one["facts"], one["lost"]) == (1, 0)
    Patch({}, model.fingerprint, "stub", (FactEdit(text, target),)).save(files[0])
    failed = run("patch", "apply", files[0], "--model", home / "model", "--output", tmp_path / "failed")
    assert failed.code == 1
    assert "1 of 1 facts do not hold" in failed.err


def test_ask_with_and_without_patches(run, home: Path, tmp_path: Path) -> None:
    model = load_model(home / "model", "cpu")
    text, before, target = one_edit(home)
    fine_tuned(model, FactEdit(text, target)).save(tmp_path / "p.safetensors")
    given = ("--model", home / "model", text, QUESTIONS[1])
    assert run("ask", *given, "--json").json["answers"] == [
        {"question": question, "answer": answer}
        for question, answer in zip([text, QUESTIONS[1]], model.predict([text, QUESTIONS[1]]), strict=True)
    ]
    asked = run("ask", *given, "--patch", tmp_path / "p.safetensors", "--json").json["answers"]
    assert asked[0] == {"question": text, "answer": before, "patched_answer": target}
    shown = run("ask", *given, "--patch", tmp_path / "p.safetensors")
    assert "patched answer" in shown.out
    tiny.build("bert", seed=3).save(tmp_path / "other")
    wrong = run("ask", text, "--model", tmp_path / "other", "--patch", tmp_path / "p.safetensors")
    assert wrong.code == 1
    assert "made for weights" in wrong.err


def test_a_method_without_a_trained_editor(run, home: Path, tmp_path: Path) -> None:
    text, before, target = one_edit(home)
    saved = tmp_path / "p.safetensors"

    def edit(*arguments: object) -> Ran:
        return run("edit", "--model", home / "model", "--input", text, "--target", target, *arguments)

    result = edit("--method", "finetune", "--set", "lr=1e-3", "--save", saved, "--json").json
    assert (result["before"], result["after"], result["success"]) == (before, target, True)
    assert Patch.load(saved).method == "finetune"
    failed = edit("--method", "finetune", "--set", "lr=1e-9", "--set", "steps=1")
    assert failed.code == 1
    assert "The edit failed. Try more steps (--set steps=300) or a higher lr." in failed.err
    cases = {
        ("--method", "finetun"): (1, "did you mean finetune?"),
        ("--method", "finetune", "--set", "speed=3"): (1, "has no option speed"),
        ("--method", "ultraedit"): (1, "name a revision file with --others"),
        ("--method", "prompt"): (1, "has no patches"),
        ("--method", "hyper"): (1, "load it from its folder with --editor"),
        (): (2, "give either --editor, or a --method"),
        ("--method", "finetune", "--editor", home / "editor"): (2, "give either --editor, or a --method"),
        ("--editor", home / "editor", "--set", "lr=1"): (2, "--set gives options to a --method"),
    }
    for arguments, (code, reason) in cases.items():
        refused = edit(*arguments)
        assert refused.code == code, arguments
        assert reason in " ".join(refused.err.replace("│", " ").split())


def test_bad_input_is_one_line_and_exit_1(edit, run, home: Path, tmp_path: Path) -> None:
    text, before, target = one_edit(home)
    cut = tmp_path / "cut.safetensors"
    assert edit("--input", text, "--target", target, "--save", cut, "--keep-failed").code == 0
    cut.write_bytes(cut.read_bytes()[:-9])
    other = tiny.build("bert", seed=3)
    other.save(tmp_path / "other")
    cases = {
        "empty": edit("--input", " ", "--target", target),
        "at most 36 tokens": edit("--input", "capital " * 99, "--target", target),
        "already says": edit("--input", text, "--target", before),
        "label": edit("--input", text, "--target", "perhaps"),
        "trained for weights": edit("--input", text, "--target", target, model=tmp_path / "other"),
        "not an editor": edit("--input", text, "--target", target, editor=tmp_path),
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
    assert result.err == "error: cuda was requested, but this machine has no usable CUDA GPU; use --device cpu\n"


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
    assert edit("--input", "x", "--target", "y", "--max-updates", "0").code == 2
    assert edit("--input", "x", "--target", "y", "--loop").code == 2


def test_options_with_choices_and_a_placeholder_state_their_names() -> None:
    """Some versions of typer would otherwise name them after the placeholder, such as --TASK."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    choices = re.findall(r"Literal\[[^]]*\](?: \| None)?,\s*typer\.Option\(\s*(.*?)\)", code, re.DOTALL)
    assert len(choices) > 8
    assert not [option for option in choices if "metavar" in option and not option.startswith('"--')]


def test_text_in_brackets_is_shown_as_it_is(edit, run, home: Path, tmp_path: Path) -> None:
    target = load_model(home / "model", "cpu").candidates(["a [/b] [red] lake"], 2)[0][1]
    shown = edit(
        "--input", "a [/b] [red] lake", "--target", target, "--save", tmp_path / "p.safetensors", "--keep-failed"
    )
    assert shown.code == 0
    assert "[/b]" in shown.out
    assert "a [/b] [red] lake" in run("patch", "show", tmp_path / "p.safetensors").out


def test_a_fact_that_is_already_true_is_named_by_its_line(edit, home: Path, tmp_path: Path, monkeypatch) -> None:
    """The facts before it are predicted in batches, and none of those that follow; with --skip-bad, in batches too."""
    monkeypatch.setattr("factpatch.cli.edit.PREDICTED_PER_BATCH", 4)
    model = load_model(home / "model", "cpu")
    lines = [{"input": x, "target": model.candidates([x], 2)[0][1]} for x in texts(11)]
    lines[5]["target"] = model.predict([lines[5]["input"]])[0]
    facts = tmp_path / "facts.jsonl"
    facts.write_text("\n".join(json.dumps(line) for line in lines))
    asked: list[int] = []
    predict = TaskModel.predict

    def counted(self: TaskModel, inputs: Sequence[str], cut: bool = False) -> list[str]:
        asked.append(len(inputs))
        return predict(self, inputs, cut)

    monkeypatch.setattr(TaskModel, "predict", counted)
    refused = edit("--facts", facts)
    assert refused.code == 1
    assert "facts.jsonl, line 6: the model already says" in refused.err
    assert asked == [4, 4]
    asked.clear()
    result = edit("--facts", facts, "--skip-bad", "--keep-failed", "--json").json
    assert (result["bad"], len(result["edits"])) == (1, 10)
    assert asked[:3] == [4, 4, 3]
