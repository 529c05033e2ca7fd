"""Damaged and hostile files: only our own errors come out, and nothing runs out of memory."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, assert_untouched, loud_editor, weights_of
from processes import Stopped, stop_at
from safetensors.torch import load_file, save_file
from samples import claims as claim_records
from samples import write_lines
from training_runs import QUICK_FIT

from factpatch import jsonl
from factpatch.editors import load_editor
from factpatch.errors import FactpatchError, FileError, InputError, MismatchError, ModelError
from factpatch.facts import FactEdit
from factpatch.merging import scaled_patch
from factpatch.models import TaskModel, load_model
from factpatch.patch import FORMAT, Patch, checksum
from factpatch.training import Fit, FitConfig

WRONG: tuple[Any, ...] = (None, -1, 0, 1e30, "x", [], {}, [1, "x"], True, 2**70)


@pytest.fixture
def bert() -> TaskModel:
    return tiny.build("bert")


def damaged_json(path: Path, keys: Callable[[str], bool] = lambda key: True) -> Iterator[str]:
    """Writes the file with each of its values replaced by each wrong one, or removed, and restores it at the end."""
    whole = path.read_text()

    def places(value: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield (*parents, key)
            yield from places(value[key], (*parents, key))

    for place in [place for place in places(json.loads(whole)) if keys(str(place[0]))]:
        for wrong in (*WRONG, ...):
            found = json.loads(whole)
            inner = found
            for key in place[:-1]:
                inner = inner[key]
            if wrong is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = wrong
            path.write_text(json.dumps(found))
            yield f"{place}={wrong}"
    for text in ("", "{", "[]", "null", "\x00", "[" * 100_000):
        path.write_text(text)
        yield text[:5]
    path.write_text(whole)


# Code in files


@pytest.mark.parametrize("model_type", ["bert", "own"])
def test_code_in_a_models_folder_never_runs(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the question whether to trust it were answered with yes, as `yes | factpatch ...` would."""
    tiny.build("bert").save(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.Own"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", "own.Own"]}),
    ):
        settings = json.loads((tmp_path / name).read_text())
        change = {"auto_map": classes, **({"model_type": model_type} if name == "config.json" else {})}
        (tmp_path / name).write_text(json.dumps({**settings, **change}))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    if model_type == "bert":
        assert load_model(tmp_path, "cpu").predict(["paris"]) == tiny.build("bert").predict(["paris"])
    else:
        with pytest.raises(ModelError, match="cannot load a model"):
            load_model(tmp_path, "cpu")
    assert not asked
    assert not (tmp_path / "ran").exists()


# Data


def test_a_line_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 1000)
    path = tmp_path / "lines.jsonl.gz"
    long = b'{"a": "' + b"x" * 10_000 + b'"}\n'
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + long + b'{"a": 2}\n'))
    with pytest.raises(InputError, match="line 2: expected at most 1,000 bytes"):
        list(jsonl.read_jsonl(path, lambda record: record))
    bad: list[str] = []
    assert list(jsonl.read_jsonl(path, lambda record: record["a"], bad.append)) == [1, 2]
    assert len(bad) == 1


def test_an_array_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_ARRAY", 5000)
    path = tmp_path / "array.json"
    path.write_text("[\n" + '{"a": 1},\n' * 1000 + '{"a": 1}]')
    with pytest.raises(InputError, match="array has more than 5,000 bytes"):
        list(jsonl.read_jsonl(path, lambda record: record))


def test_a_line_is_never_read_whole_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes can unpack to gigabytes: the memory that Python allocates stays below a few lines."""
    import tracemalloc

    monkeypatch.setattr(jsonl, "MAX_LINE", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            list(jsonl.read_jsonl(path, lambda record: record))
        assert tracemalloc.get_traced_memory()[1] < 5 * jsonl.MAX_LINE
    finally:
        tracemalloc.stop()


def test_a_prediction_that_is_too_long(bert: TaskModel) -> None:
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]), y="paris " * 10_000)
    with pytest.raises(InputError, match="prediction has 10002 tokens"):
        bert.resolve([edit])


# Patches


@pytest.fixture
def patch(bert: TaskModel) -> Patch:
    return loud_editor(bert).propose(bert, [FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]))])[0]


def forged(path: Path, tensors: dict[str, torch.Tensor], **changes: str) -> Path:
    """A patch file with a valid checksum, as only somebody who means harm would write it."""
    edits = json.dumps([{"x": "q", "a": "b", "y": "c"}])
    metadata = {"format": FORMAT, "base": "0" * 64, "method": "hyper", "edits": edits, **changes}
    save_file(tensors, path, {**metadata, "checksum": checksum(metadata, tensors)})
    return path


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(2, 2).to(torch.float8_e4m3fn),
        torch.zeros(2, 2, dtype=torch.int8),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros(0, 0),
        torch.zeros(1, 1, 1),
        torch.full((2, 2), torch.nan),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_patches_with_other_tensors(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(FileError):
        Patch.load(forged(tmp_path / "p.safetensors", {"w:delta": tensor}))


@pytest.mark.parametrize(
    "changes",
    [
        {"edits": "[" * 100_000},
        {"edits": "[1]"},
        {"edits": '[{"x": 1, "a": "b"}]'},
        {"edits": '[{"x": "q", "a": null}]'},
        {"edits": '[{"x": "q", "a": "b", "y": []}]'},
        {"edits": '[{"x": "\\ud800", "a": "b"}]'},
        {"edits": '{"x": 1}'},
        {"ridge": '{"w": "x"}'},
        {"ridge": '{"w": NaN}'},
        {"ridge": "{" * 100_000},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_patches_with_other_metadata(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(FileError):
        Patch.load(forged(tmp_path / "p.safetensors", {"w:delta": torch.zeros(2, 2)}, **changes))


def test_showing_a_patch_prints_no_codes(run: Callable[..., Ran], tmp_path: Path) -> None:
    edits = json.dumps([{"x": "\x1b[2J[red]q[/red]", "a": "\x07[/]", "y": "[link=http://x]y"}])
    tensors = {"\x1b]0;x\x07[/bold]w:delta": torch.zeros(2, 2)}
    path = forged(tmp_path / "p.safetensors", tensors, edits=edits, method="[/]\x1b[2J", base="[bold]\x1b")
    shown = run("patch", "show", path)
    assert shown.code == 0, shown.err
    assert not set(shown.out) & {"\x1b", "\x07"}
    assert "[red]q[/red]" in shown.out


def test_a_patch_that_makes_weights_infinite(bert: TaskModel, patch: Patch) -> None:
    before = weights_of(bert)
    huge = scaled_patch(scaled_patch(patch, 1e30), 1e8)
    with pytest.raises(MismatchError, match="not be finite"):
        huge.apply(bert)
    assert bert.patches == []
    assert_untouched(bert, before)


# Editors


@pytest.fixture
def editor_folder(bert: TaskModel, tmp_path: Path) -> Path:
    loud_editor(bert).save(tmp_path / "editor")
    return tmp_path / "editor"


def use_editor(folder: Path, model: TaskModel) -> None:
    editor = load_editor(folder)
    editor.propose(model, [FactEdit(QUESTIONS[0], "LABEL_0", y="LABEL_2")])


def test_editors_with_damaged_settings(bert: TaskModel, editor_folder: Path) -> None:
    for case in damaged_json(editor_folder / "config.json"):
        try:
            use_editor(editor_folder, bert)
        except FactpatchError:
            continue
        except Exception as error:
            pytest.fail(f"{case}: {error!r}")


def test_editors_with_damaged_weights(bert: TaskModel, editor_folder: Path) -> None:
    path = editor_folder / "editor.safetensors"
    whole = load_file(path)
    name = "fact_encoder.embedding.weight"
    changed = {
        "a dimension less": whole[name][0],
        "no dimension": torch.zeros(()),
        "fewer tokens": whole[name][:5],
        "not finite": torch.full_like(whole[name], torch.nan),
        "integers": whole[name].to(torch.int64),
        "one bit": whole[name] + torch.eye(*whole[name].shape),
    }
    for case, tensor in changed.items():
        save_file({**whole, name: tensor}, path)
        with pytest.raises(FileError):
            pytest.fail(f"{case}: {use_editor(editor_folder, bert)}")
    save_file({"other": torch.zeros(2)}, path)
    with pytest.raises(FileError):
        use_editor(editor_folder, bert)


# Checkpoints


def test_damaged_checkpoints(base: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", claim_records(40))
    config = FitConfig(**{**QUICK_FIT, "steps": 30, "checkpoint_seconds": 0.0})
    with pytest.raises(Stopped):
        Fit(config, str(base), tmp_path / "run", device="cpu").run(train, None, watch=stop_at(3))
    (newest,) = (tmp_path / "run" / "checkpoint").glob("step-*")

    def resume() -> None:
        Fit(config, str(base), tmp_path / "run", True, "cpu").run(train, None, watch=stop_at(1))

    files = {path.name: path.read_bytes() for path in newest.iterdir()}
    cases = 0
    for name in files:
        (newest / name).unlink()
        with pytest.raises(FileError, match="start a new run"):
            resume()
        (newest / name).write_bytes(files[name])
        if name.endswith(".safetensors"):
            save_file({"other": torch.zeros(2)}, newest / name)
            with pytest.raises(FileError, match="start a new run"):
                resume()
            (newest / name).write_bytes(files[name])
    for key in ("step", "best_step", "seconds", "metrics", "identity"):
        for wrong in ("x", None, [1], ...):
            state = json.loads(files["state.json"])
            if wrong is ...:
                del state[key]
            else:
                state[key] = wrong
            (newest / "state.json").write_text(json.dumps(state))
            with pytest.raises(FactpatchError):
                resume()
            cases += 1
    assert cases == 20


# Models


def test_damaged_models(tmp_path: Path) -> None:
    """Each file in turn is cut, emptied or changed in one place."""
    whole = tmp_path / "whole"
    tiny.build("bert").save(whole)
    rng = random.Random(0)
    for file in sorted(whole.iterdir()):
        for case in range(12):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(whole, tmp_path / "copy")
            content = bytearray(file.read_bytes())
            place = rng.randrange(min(len(content), 2000))
            if case < 6:
                content = content[:place]
            else:
                content[place : place + 1 + case] = rng.randbytes(1 + case)
            (tmp_path / "copy" / file.name).write_bytes(content)
            use_model(tmp_path / "copy", f"{file.name} {case} at {place}")


def test_models_with_damaged_settings(tmp_path: Path) -> None:
    tiny.build("bert").save(tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json"):
        for case in damaged_json(tmp_path / "model" / name):
            use_model(tmp_path / "model", f"{name} {case}")


def test_a_token_without_an_embedding(tmp_path: Path) -> None:
    tiny.build("bert").save(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"]["paris"] = 1000
    path.write_text(json.dumps(found))
    with pytest.raises(ModelError, match="highest token id is 1000"):
        load_model(tmp_path / "model", "cpu")


def changed_settings(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("architecture", ["bert", "bart", "gpt2-lm"])
def test_an_added_token_without_an_embedding(architecture: str, tmp_path: Path) -> None:
    """The model reads other texts; a text with the token is refused, and skipped where bad texts are."""
    tiny.build(architecture).save(tmp_path)
    changed_settings(tmp_path / "tokenizer_config.json", bos_token="<new>")
    model = load_model(tmp_path, "cpu")
    assert model.predict(["paris"]) == tiny.build(architecture).predict(["paris"])
    for use in (lambda text: model.predict([text]), lambda text: model.predict([text], cut=True), model.check_input):
        with pytest.raises(InputError, match="no embedding for the token '<new>'"):
            use("paris <new>")
    assert list(model.encode_readable(["paris", "paris <new>"])) == ["paris"]
    with pytest.raises(InputError):
        model.check_target("paris <new>")
    assert not model.valid_targets(["paris <new>"])


@pytest.mark.parametrize("token", [10_000, -1, 10**23])
def test_an_end_token_outside_the_vocabulary(token: int, tmp_path: Path) -> None:
    tiny.build("gpt2-lm").save(tmp_path)
    changed_settings(tmp_path / "generation_config.json", eos_token_id=token)
    assert load_model(tmp_path, "cpu").predict(["paris"]) == tiny.build("gpt2-lm").predict(["paris"])


@pytest.mark.parametrize("tokens", [-1, 0, True, 1.5, "x", None])
def test_a_decoder_with_another_length_of_answers(tmp_path: Path, tokens: Any) -> None:
    tiny.build("gpt2-lm").save(tmp_path / "model")
    (tmp_path / "model" / "decoder.json").write_text(json.dumps({"template": None, "max_answer_tokens": tokens}))
    with pytest.raises(ModelError, match="is damaged"):
        load_model(tmp_path / "model", "cpu")


def use_model(folder: Path, case: str) -> None:
    try:
        load_model(folder, "cpu").predict(QUESTIONS)
    except FactpatchError:
        pass
    except Exception as error:
        pytest.fail(f"{case}: {error!r}")
