"""A model's fingerprint, identity and precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of

from factpatch.facts import FactEdit
from factpatch.models import Classifier, Seq2Seq, TaskModel, load_model


def test_the_fingerprint_is_of_the_weights_as_stored(tmp_path: Path) -> None:
    model = tiny.build("bert")
    model.save(tmp_path / "fp32")
    stored = load_model(tmp_path / "fp32", device="cpu").fingerprint
    assert load_model(tmp_path / "fp32", device="cpu", dtype=torch.bfloat16).fingerprint == stored
    half = load_model(tmp_path / "fp32", device="cpu", dtype=torch.bfloat16)
    half.save(tmp_path / "bf16")
    halved = load_model(tmp_path / "bf16", device="cpu")
    assert halved.model.dtype == torch.bfloat16
    assert halved.fingerprint != stored, "other weights"
    assert load_model(tmp_path / "bf16", device="cpu", dtype=torch.float32).fingerprint == halved.fingerprint
    with torch.no_grad():
        next(iter(model.layers.values())).weight[0, 0] += 1
    assert tiny.build("bert").fingerprint == stored != Classifier(model.model, model.tokenizer).fingerprint


def test_the_identity_does_not_depend_on_precision(model: TaskModel, tmp_path: Path) -> None:
    model.save(tmp_path / "fp32")
    stored = [load_model(tmp_path / "fp32", "cpu", dtype) for dtype in (None, torch.bfloat16, torch.float64)]
    assert {one.identity for one in stored} == {model.identity}
    model.cast(torch.float16).save(tmp_path / "fp16")
    halves = [load_model(tmp_path / "fp16", "cpu", dtype) for dtype in (None, torch.float32, torch.bfloat16)]
    assert len({half.identity for half in halves}) == 1
    assert halves[0].identity != model.identity, "other weights"


def test_the_identity_is_of_weights_and_of_what_decides_answers(tmp_path: Path) -> None:
    bert, bart = tiny.build("bert"), tiny.build("bart")
    stored = bert.identity
    with torch.no_grad():
        bert.model.classifier.weight[0, 0] += 1
    assert Classifier(bert.model, bert.tokenizer).identity != stored == tiny.build("bert").identity
    named = tiny.build("bert", id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    assert named.identity != stored
    known = bart.identity
    bart.model.generation_config.length_penalty = 0.0
    assert Seq2Seq(bart.model, bart.tokenizer).identity != known
    bart = tiny.build("bart")
    bart.model.generation_config.use_cache = False
    assert bart.identity == known, "gives the same answers"


def test_the_identity_is_of_weights_without_patches() -> None:
    model = tiny.build("bart")
    (patch,) = loud_editor(model).propose(model, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    with patch.applied(model):
        assert model.identity == tiny.build("bart").identity


def test_another_precision_for_a_block(model: TaskModel, edits: list[FactEdit]) -> None:
    """Weights, buffers and patches are afterwards as before, though half precision loses bits."""
    first, second, _ = loud_editor(model).propose(model, edits)
    before = weights_of(model)
    first.apply(model)
    patched = weights_of(model)
    with pytest.raises(ZeroDivisionError), model.in_precision(torch.bfloat16):
        assert {weight.dtype for weight in model.model.parameters()} == {torch.bfloat16}
        _ = 1 / 0
    assert_untouched(model, patched)
    with model.in_precision(torch.bfloat16):
        first.revert(model)
        second.apply(model)
    second.revert(model)
    assert_untouched(model, before)
    weights = [weight.data_ptr() for weight in model.model.parameters()]
    with model.in_precision(torch.float32):
        assert [weight.data_ptr() for weight in model.model.parameters()] == weights, "nothing to do"


def test_a_cast_model_keeps_its_patches() -> None:
    model = tiny.build("bert")
    (patch,) = loud_editor(model).propose(model, [FactEdit(QUESTIONS[0], "LABEL_0", "LABEL_1")])
    expected = weights_of(tiny.build("bert").cast(torch.bfloat16))
    patch.apply(model).cast(torch.bfloat16).cast(torch.float32)
    patch.revert(model)
    assert_untouched(model.cast(torch.bfloat16), expected)


def test_a_patch_made_in_half_precision_applies_to_the_model_in_full(tmp_path: Path) -> None:
    tiny.build("bart").save(tmp_path / "m")
    half, full = (load_model(tmp_path / "m", "cpu", dtype) for dtype in (torch.bfloat16, None))
    (patch,) = loud_editor(half).propose(half, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    assert next(iter(patch.deltas.values())).tensors["A"].dtype == torch.bfloat16
    before = weights_of(full)
    patch.apply(full)
    patch.revert(full)
    assert_untouched(full, before)
