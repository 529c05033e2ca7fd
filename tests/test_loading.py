"""Loading a model from a folder or the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from conftest import QUESTIONS
from transformers import BertConfig, BertForMaskedLM

from factpatch import models
from factpatch.errors import FileError, ModelError
from factpatch.models import TaskModel, load_model


def test_a_saved_model_loads_as_the_same(model: TaskModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    loaded = load_model(tmp_path / "m", device="cpu")
    assert type(loaded) is type(model)
    assert loaded.fingerprint == model.fingerprint
    if model.model.config.model_type == "qwen2":  # transformers reads every tokenizer of a Qwen2 as a byte-level one
        loaded.tokenizer = model.tokenizer
    assert loaded.predict(QUESTIONS) == model.predict(QUESTIONS)


def test_what_fit_held_out_is_read(tmp_path: Path) -> None:
    tiny.build("bert").save(tmp_path / "m")
    assert load_model(tmp_path / "m", "cpu").held_out is None
    (tmp_path / "m" / "held-out.json").write_text('{"data": "0a", "seed": 0, "ids": ["a", "b"]}')
    assert load_model(tmp_path / "m", "cpu").held_out == {"a", "b"}
    for damaged in ('{"ids": ["a"', '{"ids": "a"}', "[]", "{}", '{"ids": [1]}'):
        (tmp_path / "m" / "held-out.json").write_text(damaged)
        with pytest.raises(FileError, match="is damaged"):
            load_model(tmp_path / "m", "cpu")


@pytest.mark.parametrize("architecture", tiny.SEQ2SEQS)
def test_dropout_can_be_chosen(model: TaskModel, tmp_path: Path) -> None:
    """In training, two passes over one text differ where there is dropout, and only there."""
    model.save(tmp_path / "m")
    for dropout, differs in ((0.5, True), (0.0, False)):
        loaded = load_model(tmp_path / "m", "cpu", dropout=dropout)
        rows = loaded.rows([QUESTIONS[0]], ["gitega"])
        loaded.model.train()
        assert (float(loaded.losses(rows)) != float(loaded.losses(rows))) is differs


def test_models_of_an_unsupported_kind(tmp_path: Path) -> None:
    BertForMaskedLM(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="an encoder-decoder or a decoder, found BertForMaskedLM"):
        load_model(tmp_path)


@pytest.mark.parametrize(("missing", "reason"), [("weights", "lacks .* weights"), ("tokenizer", "tokenizer")])
def test_half_a_model(tmp_path: Path, missing: str, reason: str) -> None:
    model = tiny.build("bert")
    model.save(tmp_path / "m")
    if missing == "weights":
        model.model.bert.save_pretrained(tmp_path / "bare")
        (tmp_path / "bare" / "model.safetensors").replace(tmp_path / "m" / "model.safetensors")
    else:
        for file in (tmp_path / "m").glob("tokenizer*"):
            file.unlink()
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path / "m", "cpu")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_folders_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="expected a model folder"):
        load_model(name)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a model"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["runs/fever", "hub:", "hub:a/b/c", "hub:../m"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ModelError, match=r"expected a model folder|is not a name on the hub"):
        load_model(name)


@pytest.mark.parametrize("name", ["bert-tiny", "ada/bert", "hub:bert-tiny", "hub:ada/bert"])
def test_names_that_are_looked_up_on_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(source: str, **_: object) -> None:
        asked.append(source)
        raise OSError("offline")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", look_up)
    with pytest.raises(ModelError, match="the hub has no such model"):
        load_model(name)
    assert asked == [name.removeprefix("hub:")]
