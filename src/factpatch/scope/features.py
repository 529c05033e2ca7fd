"""The model's own representation of a text: the mean of its tokens' hidden states at a few layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from factpatch.backends import no_cudnn_attention
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import Encoded


def encoder_of(model: TaskModel) -> nn.Module:
    """Returns the part of the model that reads the input."""
    network: Any = model.model
    return network.get_encoder() if network.config.is_encoder_decoder else network.base_model


@contextmanager
def recorded_states(model: TaskModel) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yields a list to which every run of the encoder appends its hidden states, embeddings first."""
    runs: list[tuple[Tensor, ...]] = []

    def ask(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**options, "output_hidden_states": True}

    def record(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        runs.append(output.hidden_states)

    encoder = encoder_of(model)
    handles = [encoder.register_forward_pre_hook(ask, with_kwargs=True), encoder.register_forward_hook(record)]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


def pool(rows: Rows, states: tuple[Tensor, ...], layers: Sequence[int]) -> Tensor:
    """Averages hidden states over each row's tokens, without padding, and concatenates layers: (rows, layers·width)."""
    mask = rows.inputs["attention_mask"].unsqueeze(-1).float()  # (rows, tokens, 1)
    return torch.cat([(states[n].float() * mask).sum(1) / mask.sum(1) for n in layers], -1)


@torch.no_grad()
@no_cudnn_attention()
def text_features(
    model: TaskModel, texts: Sequence[str], layers: Sequence[int], on_done: Callable[[int], object] = lambda texts: None
) -> Tensor:
    """Returns pooled hidden states of each text: (texts, layers·width). Texts too long for the model are truncated."""
    encoded = model.encode(texts, model.max_input_tokens)
    features = torch.zeros(len(texts), len(layers) * hidden_width(model), device=model.device)
    encoder = encoder_of(model)
    for batch in model.batches([len(one["input_ids"]) for one in encoded]):
        rows = model.collate([encoded[i] for i in batch])
        features[batch] = pool(rows, encoder(**rows.inputs, output_hidden_states=True).hidden_states, layers)
        on_done(len(batch))
    return features


@torch.no_grad()
@no_cudnn_attention()
def predict_with_features(
    model: TaskModel, encoded: Sequence[Encoded], layers: Sequence[int]
) -> tuple[list[str], Tensor]:
    """Returns the model's answers, and the pooled hidden states of the same forward passes."""
    answers = [""] * len(encoded)
    features = torch.zeros(len(encoded), len(layers) * hidden_width(model), device=model.device)
    for batch in model.batches([len(one["input_ids"]) for one in encoded]):
        rows = model.collate([encoded[i] for i in batch])
        with recorded_states(model) as runs:
            decided = model.decide(rows, edits=1)
        features[batch] = pool(rows, runs[0], layers)
        for i, ranked in zip(batch, decided, strict=True):
            answers[i] = ranked[0]
    return answers, features


def hidden_width(model: TaskModel) -> int:
    return model.model.config.hidden_size


def spread_layers(model: TaskModel) -> tuple[int, ...]:
    """Returns the indices of the embeddings (0), the last layer and two evenly spaced layers between them."""
    config = model.model.config
    depth: int = getattr(config, "encoder_layers", None) or config.num_hidden_layers
    return tuple(sorted({0, depth // 3, 2 * depth // 3, depth}))
