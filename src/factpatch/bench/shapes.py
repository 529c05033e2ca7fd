"""Random models and batches with the shapes of real ones: speed does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from factpatch.device import find_device, find_dtype
from factpatch.editors import Condition, EditBatch
from factpatch.errors import InputError
from factpatch.models import Classifier, Rows, Seq2Seq, TaskModel
from factpatch.training.batcher import ControlTargets, StepBatch, Targets

WORDS = [f"w{i}" for i in range(1000)]
ANSWER_TOKENS = 8  # length of the answers of an encoder-decoder


def _bert(**sizes: int) -> TaskModel:
    return Classifier(BertForSequenceClassification(BertConfig(**sizes)), _tokenizer())


def _bart() -> TaskModel:
    config = BartConfig(d_model=768, **_stacks(layers=6, attention_heads=12, ffn_dim=3072))
    return Seq2Seq(BartForConditionalGeneration(config), _tokenizer())


def _marian() -> TaskModel:
    ids = {"vocab_size": 59514, "pad_token_id": 59513, "eos_token_id": 0, "decoder_start_token_id": 59513}
    sizes = _stacks(layers=6, attention_heads=8, ffn_dim=2048)
    return Seq2Seq(MarianMTModel(MarianConfig(d_model=512, max_position_embeddings=512, **ids, **sizes)), _tokenizer())


def _stacks(**sizes: int) -> dict[str, int]:
    """Returns config values that are equal for the encoder and the decoder."""
    return {f"{stack}_{size}": n for stack in ("encoder", "decoder") for size, n in sizes.items()}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word, so that the length of texts is known."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", *WORDS])}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] (stubs lack the setter)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


SHAPES: dict[str, Callable[[], TaskModel]] = {
    "bert-base": _bert,
    "bart-base": _bart,
    "minilm": lambda: _bert(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
    "marian": _marian,
}


def shaped_model(shape: str, device: str | None = None, precision: str | None = None) -> TaskModel:
    if shape not in SHAPES:
        raise InputError(f"there is no shape called {shape!r}; choose one of {', '.join(SHAPES)}")
    model = SHAPES[shape]()
    model.model.to(device=find_device(device), dtype=find_dtype(precision, device))
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


def random_step(model: TaskModel, edits: int, rows: int, tokens: int) -> StepBatch:
    """Makes a training batch, in which two rows of each edit should change and the others should not."""
    batch = random_rows(model, edits * rows, tokens)
    labels = batch.labels
    assert labels is not None
    answer = labels[0].numel()
    positions = torch.arange(edits * rows * answer, device=model.device).view(edits, rows, answer)
    edit, keep = positions[:, :2].flatten(), positions[:, 2:].flatten()

    def weights(chosen: Tensor) -> Tensor:
        return torch.full((len(chosen),), 1 / len(chosen), device=model.device)

    chosen = Rows(batch.inputs, labels, torch.cat([edit, keep]))
    index = torch.arange(len(keep), device=model.device)
    return StepBatch(
        random_edits(model, edits, tokens),
        chosen,
        Targets(labels.flatten()[edit], weights(edit), edit),
        ControlTargets(labels.flatten()[keep], weights(keep), keep, index),
    )


def kept_features(model: TaskModel, batch: StepBatch) -> Tensor:
    return model.features(Rows(batch.rows.inputs, batch.rows.labels, batch.control_targets.positions))
