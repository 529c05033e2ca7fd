"""The model's own hidden states of texts, at a few layers of the part that reads the input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factpatch.backends import no_cudnn_attention
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import Encoded


@dataclass(frozen=True)
class States:
    """Hidden states of one batch of texts."""

    numbers: list[int]  # of the texts in the batch, in the order of its rows
    layers: list[Tensor]  # (rows, tokens, width) for each layer, in float32
    mask: Tensor  # (rows, tokens): whether a token belongs to the text, rather than to the padding
    answers: list[str]  # of the model; empty if only the encoder ran

    def pooled(self) -> Tensor:
        """Averages the states over each text's tokens and concatenates the layers: (rows, layers·width)."""
        mask = self.mask.unsqueeze(-1).float()  # (rows, tokens, 1)
        return torch.cat([(states * mask).sum(1) / mask.sum(1) for states in self.layers], -1)

    def tokens(self) -> Tensor:
        """Returns the states of all tokens, text after text, without padding: (tokens, layers·width)."""
        return torch.cat([states[self.mask] for states in self.layers], -1)


def text_states(model: TaskModel, texts: Sequence[str], layers: Sequence[int]) -> Iterator[States]:
    """Reads texts in batches of similar length. Texts too long for the model are truncated."""
    return _states(model, model.encode(texts, model.max_input_tokens), layers, predict=False)


def text_features(model: TaskModel, texts: Sequence[str], layers: Sequence[int]) -> Tensor:
    """Returns the pooled hidden states of each text: (texts, layers·width)."""
    features = torch.zeros(len(texts), len(layers) * model.model.config.hidden_size, device=model.device)
    for states in text_states(model, texts, layers):
        features[states.numbers] = states.pooled()
    return features


def predicted_states(model: TaskModel, encoded: Sequence[Encoded], layers: Sequence[int]) -> Iterator[States]:
    """Answers encoded texts, and yields the hidden states of the same forward passes."""
    return _states(model, encoded, layers, predict=True)


def _states(model: TaskModel, encoded: Sequence[Encoded], layers: Sequence[int], predict: bool) -> Iterator[States]:
    for batch in model.batches([len(one["input_ids"]) for one in encoded]):
        rows = model.collate([encoded[i] for i in batch])
        hidden, answers = _run(model, rows, predict)
        yield States(batch, [hidden[n].float() for n in layers], rows.inputs["attention_mask"].bool(), answers)


@torch.no_grad()
@no_cudnn_attention()
def _run(model: TaskModel, rows: Rows, predict: bool) -> tuple[tuple[Tensor, ...], list[str]]:
    """Returns the hidden states at each layer, embeddings first, and the answers if asked for."""
    if not predict:
        return encoder_of(model)(**rows.inputs, output_hidden_states=True).hidden_states, []
    with recorded_states(model) as runs:
        answers = [ranked[0] for ranked in model.decide(rows, edits=1)]
    return runs[0], answers


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


def spread_layers(model: TaskModel) -> tuple[int, ...]:
    """Returns the indices of the embeddings (0), the last layer and two evenly spaced layers between them."""
    config = model.model.config
    depth: int = getattr(config, "encoder_layers", None) or config.num_hidden_layers
    return tuple(sorted({0, depth // 3, 2 * depth // 3, depth}))
