"""Random models and batches with the shapes of real ones: speed does not depend on the weights' values."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from factpatch.device import find_device, find_dtype
from factpatch.editors import Condition, EditBatch
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import Causal, Classifier, Rows, Seq2Seq, TaskModel
from factpatch.training.batcher import ControlTargets, StepBatch, Targets

WORDS = [f"w{i}" for i in range(1000)]
ANSWER_TOKENS = 8  # length of the answers of encoder-decoders and decoders
DECODER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def _bert(**sizes: int) -> TaskModel:
    return Classifier(BertForSequenceClassification(BertConfig(**sizes)), _tokenizer())


def _bart() -> TaskModel:
    config = BartConfig(d_model=768, **_stacks(layers=6, attention_heads=12, ffn_dim=3072))
    return Seq2Seq(BartForConditionalGeneration(config), _tokenizer())


def _marian() -> TaskModel:
    ids = {"vocab_size": 59514, "pad_token_id": 59513, "eos_token_id": 0, "decoder_start_token_id": 59513}
    sizes = _stacks(layers=6, attention_heads=8, ffn_dim=2048)
    return Seq2Seq(MarianMTModel(MarianConfig(d_model=512, max_position_embeddings=512, **ids, **sizes)), _tokenizer())


def _decoder(model_class: Any, *sizes: int, tied: bool = True) -> TaskModel:
    """Makes a decoder of one of transformers' classes with the given DECODER_SIZES."""
    options = {"max_position_embeddings": 8192, "tie_word_embeddings": tied}
    config = model_class.config_class(**dict(zip(DECODER_SIZES, sizes, strict=True)), **options)
    return Causal(model_class(config), _tokenizer())


def _stacks(**sizes: int) -> dict[str, int]:
    """Returns config values that are equal for the encoder and the decoder."""
    return {f"{stack}_{size}": n for stack in ("encoder", "decoder") for size, n in sizes.items()}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word, so that the length of texts is known."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] (stubs lack the setter)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


SHAPES: dict[str, Callable[[], TaskModel]] = {
    "bert-base": _bert,
    "bart-base": _bart,
    "minilm": lambda: _bert(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
    "marian": _marian,
    "smollm2": lambda: _decoder(LlamaForCausalLM, 49_152, 576, 1536, 30, 9, 3),
    "qwen-1.5b": lambda: _decoder(Qwen2ForCausalLM, 151_936, 1536, 8960, 28, 12, 2),
    "llama-8b": lambda: _decoder(LlamaForCausalLM, 128_256, 4096, 14_336, 32, 32, 8, tied=False),
}


def shaped_model(shape: str, device: str | None = None, precision: str | None = None) -> TaskModel:
    """Builds a random model of one of the SHAPES."""
    if shape not in SHAPES:
        raise InputError(f"there is no shape called {shape!r}; choose one of {', '.join(SHAPES)}")
    target_device, dtype, before = find_device(device), find_dtype(precision, device), torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # built in this precision, because a large model may not fit in float32
    try:
        with target_device:
            model = SHAPES[shape]()
    finally:
        torch.set_default_dtype(before)
    model.model.to(device=target_device, dtype=dtype)
    model.fingerprint = f"random {shape}"  # instead of a hash, which takes a minute for a large model
    return model


def random_rows(model: TaskModel, rows: int, tokens: int) -> Rows:
    """Makes texts of `tokens` random tokens with random targets."""

    def ids(width: int) -> Tensor:
        return torch.randint(4, 20_000, (rows, width), device=model.device)

    input_ids = ids(tokens)
    labels = ids(1)[:, 0] % 2 if model.kind == "classifier" else ids(ANSWER_TOKENS)
    return Rows({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}, labels)


def random_edits(model: TaskModel, edits: int, tokens: int) -> EditBatch:
    """Makes edits of random texts. The editor also reads the old and the new answer of each."""
    length = tokens + 2 * ANSWER_TOKENS
    ids = torch.randint(4, 20_000, (edits, length), device=model.device)
    condition = Condition(ids, torch.full((edits,), length, device=model.device))
    return EditBatch(random_rows(model, edits, tokens), condition)


def random_fact(model: TaskModel, tokens: int) -> FactEdit:
    """Returns an edit of an input with `tokens` random words, whose target is as long as an answer may be."""
    words = [word for word in sorted(model.tokenizer.get_vocab()) if word.isalnum()]
    drawn = iter([words[i] for i in torch.randint(len(words), (tokens + 2 * ANSWER_TOKENS,)).tolist()])
    x, y, a = (" ".join(islice(drawn, count)) for count in (tokens, ANSWER_TOKENS - 1, ANSWER_TOKENS - 1))
    return FactEdit(x=x, y=y, a=a)


def random_step(model: TaskModel, edits: int, rows: int, tokens: int) -> StepBatch:
    """Makes a training batch: two rows of each edit have edit targets, and the others are control inputs."""
    batch = random_rows(model, edits * rows, tokens)
    return _step(random_edits(model, edits, tokens), batch, edits, first_control=0, share=1.0)


def split_step(batch: StepBatch, edits: int, parts: int) -> list[StepBatch]:
    """Splits a random training batch into parts with consecutive edits."""
    (rows,) = batch.row_groups
    rows_per_edit = len(rows) // edits
    controls_per_edit = len(batch.control_targets.labels) // edits
    size = math.ceil(edits / parts)
    batches: list[StepBatch] = []
    for start in range(0, edits, size):
        end = min(start + size, edits)
        edit_batch = batch.edit_batch.part(slice(start, end))
        own_rows = rows.part(slice(start * rows_per_edit, end * rows_per_edit))
        share = (end - start) / edits
        batches.append(_step(edit_batch, own_rows, end - start, first_control=start * controls_per_edit, share=share))
    return batches


def _step(edit_batch: EditBatch, rows: Rows, edits: int, first_control: int, share: float) -> StepBatch:
    """Makes one part of a training batch, with this share of the batch's weights.

    `first_control` is the index of the part's first control position among those of the whole batch.
    """
    labels = rows.labels
    assert labels is not None
    positions = torch.arange(labels.numel(), device=labels.device).view(edits, -1, labels[0].numel())
    changed, control = positions[:, :2].flatten(), positions[:, 2:].flatten()

    def weights(chosen: Tensor) -> Tensor:
        return torch.full((len(chosen),), share / len(chosen), device=labels.device)

    unedited_index = first_control + torch.arange(len(control), device=labels.device)
    return StepBatch(
        edit_batch,
        (Rows(rows.inputs, labels, torch.cat([changed, control])),),
        Targets(labels.flatten()[changed], weights(changed)),
        ControlTargets(labels.flatten()[control], weights(control), unedited_index),
    )


def kept_features(model: TaskModel, batch: StepBatch) -> Tensor:
    """Computes the unedited model's features at the control positions of a random training batch."""
    (rows,) = batch.row_groups
    return model.features(rows)[len(batch.edit_targets.labels) :]
