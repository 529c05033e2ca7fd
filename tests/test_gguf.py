"""Decoders in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import QUESTIONS, Ran, loud_editor
from tokenizers.pre_tokenizers import ByteLevel

from factpatch.errors import ModelError
from factpatch.facts import FactEdit
from factpatch.models import Causal, load_model

gguf = pytest.importorskip("gguf")

TOKENS = ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "pa"]
SHAPES = {
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def write_gguf(path: Path, architecture: str = "llama", merges: Sequence[str] = ("p a",)) -> Path:
    """Writes a random decoder with two blocks, quantised to eight bits, and a tokenizer that reads bytes."""
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, 8),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, len(TOKENS)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, TOKENS),
        (writer.add_token_types, [3, 3, 3] + [1] * (len(TOKENS) - 3)),
        (writer.add_token_merges, list(merges)),
        (writer.add_pad_token_id, 0),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        add(value)
    rng = np.random.default_rng(0)
    shapes = {f"blk.{block}.{name}": shape for block in range(2) for name, shape in SHAPES.items()}
    for name, shape in {"token_embd": (len(TOKENS), 32), **shapes}.items():
        weight = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        eight_bits = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight, eight_bits), raw_dtype=eight_bits)
    for name in ("output_norm", *(f"blk.{block}.{kind}_norm" for block in range(2) for kind in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_a_model_that_can_be_edited_cast_and_saved(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    model = load_model(path, "cpu")
    assert isinstance(model, Causal)
    assert all(type(layer) is torch.nn.Linear for layer in model.layers.values())
    assert model.model.dtype == torch.float32
    assert load_model(tmp_path, "cpu").identity == model.identity, "the folder means its only file"
    (patch,) = loud_editor(model).propose(model, [FactEdit("lake", "paris", "no")])
    weights = {name: layer.weight.clone() for name, layer in model.layers.items()}
    with patch.applied(model):
        assert all(not torch.equal(layer.weight, weights[name]) for name, layer in model.layers.items())
    assert all(torch.equal(layer.weight, weights[name]) for name, layer in model.layers.items())
    model.save(tmp_path / "saved")
    saved = load_model(tmp_path / "saved", "cpu")
    assert saved.identity == model.identity
    assert saved.predict(QUESTIONS) == model.predict(QUESTIONS)
    assert load_model(path, "cpu", torch.bfloat16).model.dtype == torch.bfloat16


def test_a_truncated_file(tmp_path: Path, run: Callable[..., Ran]) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    content = path.read_bytes()
    for size in (10, 1000, len(content) - 1000):
        path.write_bytes(content[:size])
        ran = run("ask", "--model", path, "lake")
        assert (ran.code, ran.err.count("\n")) == (1, 1)
        assert "not a readable GGUF file; it may be truncated" in ran.err


def test_a_tokenizer_that_cannot_be_built(tmp_path: Path, run: Callable[..., Ran]) -> None:
    """The package tokenizers raises a plain Exception for it."""
    path = write_gguf(tmp_path / "model.gguf", merges=["p q"])
    ran = run("ask", "--model", path, "lake")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "cannot load a model" in ran.err


def test_an_unknown_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "perceiver")
    with pytest.raises(ModelError, match="architecture perceiver, which transformers cannot read"):
        load_model(tmp_path, "cpu")


def test_a_folder_with_several_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one of them"):
        load_model(tmp_path, "cpu")


def test_the_package_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr("factpatch.models.gguf.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'factpatch\[gguf\]'"):
        load_model(path, "cpu")
