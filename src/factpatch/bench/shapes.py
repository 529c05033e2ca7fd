"""Random models and batches with the shapes of real ones: speed does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
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


def _bert(**sizes: int) -> TaskModel:
    return Classifier(BertForSequenceClassification(BertConfig(**sizes)), _tokenizer())


def _bart() -> TaskModel:
    config = BartConfig(d_model=768, **_stacks(layers=6, attention_heads=12, ffn_dim=3072))
    return Seq2Seq(BartForConditionalGeneration(config), _tokenizer())


def _marian() -> TaskModel:
    ids = {"vocab_size": 59514, "pad_token_id": 59513, "eos_token_id": 0, "decoder_start_token_id": 59513}
    sizes = _stacks(layers=6, attention_heads=8, ffn_dim=2048)
    return Seq2Seq(MarianMTModel(MarianConfig(d_model=512, max_position_embeddings=512, **ids, **sizes)), _tokenizer())


def _llama(**sizes: int | bool) -> TaskModel:
    return Causal(LlamaForCausalLM(LlamaConfig(max_position_embeddings=8192, **sizes)), _tokenizer())


def _qwen() -> TaskModel:
    sizes = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    return Causal(Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)), _tokenizer())


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
    "smollm2": lambda: _llama(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "qwen-1.5b": _qwen,
    "llama-8b": lambda: _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}


def shaped_model(shape: str, device: str | None = None, precision: str | None = None) -> TaskModel:
    if shape not in SHAPES:
        raise InputError(f"there is no shape called {shape!r}; choose one of {', '.join(SHAPES)}")
    where, dtype, before = find_device(device), find_dtype(precision, device), torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # large models are built in place: in float32 they may not fit into memory
    try:
        with where:
            model = SHAPES[shape]()
    finally:
        torch.set_default_dtype(before)
    model.model.to(device=where, dtype=dtype)
    model.fingerprint = f"random {shape}"  # instead of a hash, which takes a minute for a large model
    return model


def random_rows(model: TaskModel, rows: int, tokens: int) -> Rows:
    def ids(width: int) -> Tensor:
        return torch.randint(4, 20_000, (rows, width), device=model.device)

    inputs = {
        "input_ids": ids(tokens),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=model.device),
    }
    labels = ids(1)[:, 0] % 2 if model.kind == "classifier" else ids(ANSWER_TOKENS)
    return Rows(inputs, labels)


def random_edits(model: TaskModel, edits: int, tokens: int) -> EditBatch:
    width = tokens + 2 * ANSWER_TOKENS
    ids = torch.randint(4, 20_000, (edits, width), device=model.device)
    return EditBatch(
        random_rows(model, edits, tokens), Condition(ids, torch.full((edits,), width, device=model.device))
    )


def random_fact(model: TaskModel, tokens: int) -> FactEdit:
    """Returns an edit of an input with `tokens` random words, whose target is as long as an answer may be."""
    words = [word for word in sorted(model.tokenizer.get_vocab()) if word.isalnum()]
    drawn = iter([words[i] for i in torch.randint(len(words), (tokens + 2 * ANSWER_TOKENS,)).tolist()])
    x, y, a = (" ".join(islice(drawn, count)) for count in (tokens, ANSWER_TOKENS - 1, ANSWER_TOKENS - 1))
    return FactEdit(x=x, y=y, a=a)


def random_step(model: TaskModel, edits: int, rows: int, tokens: int) -> StepBatch:
    """Makes a training batch, in which two rows of each edit should change and the others should not."""
    batch = random_rows(model, edits * rows, tokens)
    return _step(random_edits(model, edits, tokens), batch, edits, first=0, share=1.0)


def split_step(batch: StepBatch, edits: int, parts: int) -> list[StepBatch]:
    """Splits a random training batch into parts with consecutive edits."""
    if parts == 1:
        return [batch]
    found: list[StepBatch] = []
    start = 0
    for part in torch.arange(edits).chunk(parts):
        count = len(part)
        mine, own_rows = slice(start, start + count), len(batch.rows) // edits
        inside = slice(start * own_rows, (start + count) * own_rows)
        first = start * len(batch.control_targets.labels) // edits
        found.append(_step(batch.edit_batch.part(mine), batch.rows.part(inside), count, first, count / edits))
        start += count
    return found


def _step(edit_batch: EditBatch, batch: Rows, edits: int, first: int, share: float) -> StepBatch:
    """Makes the part of a step's batch that has this share of its weights.

    `first` is the index of the part's first control position in the table of features.
    """
    labels = batch.labels
    assert labels is not None
    answer = labels[0].numel()
    positions = torch.arange(labels.numel(), device=labels.device).view(edits, -1, answer)
    edit, keep = positions[:, :2].flatten(), positions[:, 2:].flatten()

    def weights(chosen: Tensor) -> Tensor:
        return torch.full((len(chosen),), share / len(chosen), device=labels.device)

    return StepBatch(
        edit_batch,
        Rows(batch.inputs, labels, torch.cat([edit, keep])),
        Targets(labels.flatten()[edit], weights(edit), edit),
        ControlTargets(
            labels.flatten()[keep], weights(keep), keep, first + torch.arange(len(keep), device=keep.device)
        ),
    )


def kept_features(model: TaskModel, batch: StepBatch) -> Tensor:
    return model.features(Rows(batch.rows.inputs, batch.rows.labels, batch.control_targets.positions))
