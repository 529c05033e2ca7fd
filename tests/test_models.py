"""Task models: what is editable, what is said, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from factpatch.errors import InputError, ModelError
from factpatch.facts import FactEdit
from factpatch.models import Causal, Seq2Seq, TaskModel, TextModel, editable_layers

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
