"""Task models: what is editable, what is said, what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from factpatch import models
from factpatch.device import find_device, idle_cores, use_free_cores
from factpatch.errors import DeviceError, FileError, InputError, ModelError
from factpatch.facts import FactEdit
from factpatch.models import Causal, Classifier, Seq2Seq, TaskModel, TextModel, editable_layers, load_model
from factpatch.models.gpu import align, pad_rows

EDITABLE = {
    **dict.fromkeys(("deberta", "gpt2", "gpt2-lm", "gpt-neox"), 2 * 4),
    **dict.fromkeys(("llama", "qwen2", "gemma3"), 2 * 7),
    **dict.fromkeys(("bart", "t5", "marian"), 2 * 6 + 2 * 10),
}


def test_every_linear_weight_inside_the_blocks_is_editable_and_nothing_else(
    model: TaskModel, architecture: str
) -> None:
    assert len(model.layers) == EDITABLE.get(architecture, 2 * 6)
    for outside in ("embed", "norm", "pooler", "classifier", "score", "lm_head", "shared"):
        assert not any(outside in name.lower() for name in model.layers)
    parameters = dict(model.model.named_parameters())
    assert all(parameters[name] is layer.weight for name, layer in model.layers.items())


def test_predictions_do_not_depend_on_what_else_is_asked(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    together = model.predict(QUESTIONS)
    assert together == [model.predict([question])[0] for question in QUESTIONS]
    monkeypatch.setattr("factpatch.models.base.TOKENS_PER_BATCH", {"cpu": 12})
    assert model.predict(QUESTIONS) == together


def test_losses_are_the_plain_cross_entropy_of_each_row(model: TaskModel, edits: list[FactEdit]) -> None:
    """Rows in a padded batch against transformers' own loss of each alone."""
    found = model.losses(model.rows([e.x for e in edits], [e.a for e in edits]))
    for edit, loss in zip(edits, found, strict=True):
        rows = model.rows([edit.x], [edit.a])
        inputs, labels = rows.inputs, rows.labels
        if isinstance(model, Causal):  # prompt and target as one text, in which only the target counts
            assert labels is not None
            prompt = inputs["input_ids"]
            inputs = {"input_ids": torch.cat([prompt, labels], 1)}
            labels = torch.cat([torch.full_like(prompt, -100), labels], 1)
        assert torch.allclose(loss, model.model(**inputs, labels=labels).loss, rtol=1e-4)


def test_a_saved_model_loads_as_the_same(model: TaskModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    loaded = load_model(tmp_path / "m", device="cpu")
    assert type(loaded) is type(model)
    assert loaded.fingerprint == model.fingerprint
    if model.model.config.model_type == "qwen2":  # transformers reads every tokenizer of a Qwen2 as a byte-level one
        loaded.tokenizer = model.tokenizer
    assert loaded.predict(QUESTIONS) == model.predict(QUESTIONS)


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


def test_what_fit_held_out_is_read(tmp_path: Path) -> None:
    tiny.build("bert").save(tmp_path / "m")
    assert load_model(tmp_path / "m", "cpu").held_out is None
    (tmp_path / "m" / "held-out.json").write_text('{"data": "0a", "seed": 0, "ids": ["a", "b"]}')
    assert load_model(tmp_path / "m", "cpu").held_out == {"a", "b"}
    for damaged in ('{"ids": ["a"', '{"ids": "a"}', "[]", "{}", '{"ids": [1]}'):
        (tmp_path / "m" / "held-out.json").write_text(damaged)
        with pytest.raises(FileError, match="is damaged"):
            load_model(tmp_path / "m", "cpu")


def capped_model() -> Seq2Seq:
    """A tiny T5Gemma, whose logits are capped after its LM head."""
    part: dict[str, Any] = {
        "vocab_size": len(tiny.VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "initializer_range": 0.3,
        "final_logit_softcapping": 3.0,
    }
    special = {"pad_token_id": tiny.PAD, "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS}
    torch.manual_seed(0)
    config = T5GemmaConfig(encoder={**part, **special}, decoder={**part, **special}, **special)
    return Seq2Seq(T5GemmaForConditionalGeneration(config), tiny.tokenizer(True))


@torch.no_grad()
def test_scores_of_features_are_the_models_logits() -> None:
    """Also where the head is followed by a soft cap, and for chosen positions alone."""
    for model in (*map(tiny.build, tiny.SEQ2SEQS), capped_model()):
        rows = model.rows(QUESTIONS, ["gitega", "paris and bujumbura", "euro"])
        expected = model.logits(rows).flatten(0, 1)
        torch.testing.assert_close(model.scores(model.features(rows)), expected, rtol=1e-5, atol=1e-5)
        rows = replace(rows, target_positions=torch.tensor([0, 3]))
        torch.testing.assert_close(model.scores(model.features(rows)), expected[[0, 3]], rtol=1e-5, atol=1e-5)


def test_a_patch_made_in_half_precision_applies_to_the_model_in_full(tmp_path: Path) -> None:
    tiny.build("bart").save(tmp_path / "m")
    half, full = (load_model(tmp_path / "m", "cpu", dtype) for dtype in (torch.bfloat16, None))
    (patch,) = loud_editor(half).propose(half, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    assert next(iter(patch.deltas.values())).tensors["A"].dtype == torch.bfloat16
    before = weights_of(full)
    patch.apply(full)
    patch.revert(full)
    assert_untouched(full, before)


@pytest.mark.parametrize("architecture", tiny.SEQ2SEQS)
def test_dropout_can_be_chosen(model: TaskModel, tmp_path: Path) -> None:
    """In training, two passes over one text differ where there is dropout, and only there."""
    model.save(tmp_path / "m")
    for dropout, differs in ((0.5, True), (0.0, False)):
        loaded = load_model(tmp_path / "m", "cpu", dropout=dropout)
        rows = loaded.rows([QUESTIONS[0]], ["gitega"])
        loaded.model.train()
        assert (float(loaded.losses(rows)) != float(loaded.losses(rows))) is differs


def test_labels_are_matched_whatever_their_case() -> None:
    bert = tiny.build("bert")
    assert bert.check_target(" label_1 ") == "LABEL_1"


def test_prediction_is_filled_in_and_given_ones_are_kept() -> None:
    bart = tiny.build("bart")
    filled, given = bart.resolve([FactEdit(QUESTIONS[0], "paris"), FactEdit(QUESTIONS[1], "paris", "gitega")])
    assert filled.y == bart.predict([QUESTIONS[0]])[0]
    assert given.y == "gitega"


# Bad input


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_text(model: TaskModel, text: str) -> None:
    for attempt in (lambda: model.predict([text]), lambda: model.resolve([FactEdit(text, "paris")])):
        with pytest.raises(InputError, match="empty"):
            attempt()


def test_over_long_text(model: TaskModel) -> None:
    _leave_room(model, 36)
    long = " ".join(["capital"] * 60)
    with pytest.raises(InputError, match="at most 36 tokens, this input has 6"):
        model.resolve([FactEdit(long, "paris")])


def _leave_room(model: TaskModel, tokens: int) -> None:
    """Makes a decoder's answers so short that prompts may have this many tokens."""
    if isinstance(model, Causal):
        model.limit_answers(model.max_input_tokens + model.max_answer_tokens - tokens)


def test_the_longest_text_that_fits(model: TaskModel) -> None:
    _leave_room(model, 36)
    special = len(model.tokenizer("")["input_ids"])
    assert len(model.predict([" ".join(["capital"] * (36 - special))])) == 1


def test_target_equal_to_the_prediction(model: TaskModel, edits: list[FactEdit]) -> None:
    said = edits[0].y
    if not said or len(model.tokenizer(said)["input_ids"]) > 30:
        edits = [FactEdit(edits[0].x, "gitega", "Gitega")] if isinstance(model, TextModel) else edits
        said = "gitega"
    with pytest.raises(InputError, match="already says"):
        model.resolve([FactEdit(edits[0].x, said, edits[0].y)])


def test_a_label_that_the_classifier_does_not_have() -> None:
    with pytest.raises(InputError, match="no label 'maybe'; choose one of LABEL_0, LABEL_1, LABEL_2"):
        tiny.build("bert").resolve([FactEdit(QUESTIONS[0], "maybe")])


@pytest.mark.parametrize(
    ("target", "reason"), [("", "empty"), ("paris " * 40, "at most 32 tokens"), ("zürich", "turns")]
)
def test_targets_that_cannot_be_said(target: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        tiny.build("bart").resolve([FactEdit(QUESTIONS[0], target)])


def test_models_of_an_unsupported_kind(tmp_path: Path) -> None:
    BertForMaskedLM(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="an encoder-decoder or a decoder, found BertForMaskedLM"):
        load_model(tmp_path)


def test_models_without_transformer_blocks() -> None:
    images = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    )
    with pytest.raises(ModelError, match="nothing to edit"):
        editable_layers(images)


def test_labels_that_cannot_be_told_apart() -> None:
    with pytest.raises(ModelError, match="differ by more than case and punctuation"):
        tiny.build("bert", id2label={0: "-1", 1: "0", 2: "1"}, label2id={"-1": 0, "0": 1, "1": 2})


def test_no_more_answers_than_beams() -> None:
    assert [len(ranked) for ranked in tiny.build("bart").candidates(QUESTIONS, count=9)] == [5, 5, 5]


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


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu").type == "cpu"
    with pytest.raises(DeviceError, match="expected a device"):
        find_device("gpu9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no usable CUDA GPU; use --device cpu"):
        find_device("cuda")


def test_threads_suit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("factpatch.device.idle_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_free_cores(tiny.build("bert"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    use_free_cores(tiny.build("bert"))
    assert chosen == [7]


def test_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= idle_cores(0.01) <= len(os.sched_getaffinity(0))
    for after, idle in (([(110, 200), (200, 200), (190, 200)], 2), ([(100, 200)] * 3, 1)):
        times = iter([[(100, 100)] * 3, after])
        monkeypatch.setattr("factpatch.device._core_times", lambda times=times: next(times))
        assert idle_cores(0) == idle


@pytest.mark.skipif(not torch.cuda.is_available(), reason="is for CUDA GPUs only")
def test_an_aligned_head_says_the_same() -> None:
    head = torch.nn.Linear(16, 21).cuda().requires_grad_(False)
    x = torch.randn(5, 16, device="cuda")
    before = head(x)
    align(head)
    for _ in range(2):
        torch.testing.assert_close(head(x), before)
    head.weight.mul_(2)
    torch.testing.assert_close(head(x) - head.bias, 2 * (before - head.bias))


def test_an_aligned_head_is_stored_as_it_was() -> None:
    head = torch.nn.Linear(16, 21)
    x = torch.randn(5, 16)
    names, before = list(head.state_dict()), head(x)
    align(head)
    assert list(head.state_dict()) == names
    assert torch.equal(head(x), before)
    assert torch.equal(pad_rows(head.weight)[:21], head.weight)
    assert pad_rows(head.bias).shape == (24,)


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
