"""TextModel: the common part of encoder-decoders and decoders, whose answers are texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.errors import InputError
from factpatch.facts import same
from factpatch.models.base import TaskModel
from factpatch.models.gpu import align
from factpatch.models.rows import NO_TARGET, Rows, selected

# Differences of two scores that rounding may reverse: in float32 on a CPU, and with the products of a GPU.
NEAR_TIE = {"cpu": 1e-3, "cuda": 0.05}
MAX_DECODED = 200_000  # answers whose texts are cached
MAX_ANSWER_TOKENS = 32  # unless the model's folder sets another limit


class TextModel(TaskModel):
    """A model that answers with a text, token by token. Targets are (rows, tokens)."""

    beams = 5
    max_answer_tokens: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._texts: dict[tuple[int, ...], str] = {}
        align(self._head)
        self._head_is_linear = True  # as `head` assumes while it is checked
        self._head_is_linear = self._check_head()

    @abstractmethod
    def encode_targets(self, targets: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each target, including the end token."""

    @abstractmethod
    def fit_answers(self, tokens: int) -> None:
        """Adopts the maximum length of an answer that fine-tuning found, to be saved with the model."""

    @abstractmethod
    def _forward(self, rows: Rows) -> Tensor:
        """Returns logits of inputs and targets: (rows, tokens, vocabulary). The targets' positions come last."""

    @abstractmethod
    def _forward_one(self) -> Tensor:
        """Returns the logits of one arbitrary token."""

    @abstractmethod
    def _spelled(self, targets: Sequence[list[int]]) -> list[str]:
        """Returns the answer text of each sequence of generated tokens."""

    def logits(self, rows: Rows) -> Tensor:
        # Of a slice that is not contiguous, a linear layer makes one product per row, each with a copy of its weight.
        with self._head_reads(lambda states: states[:, -_width(rows) :].contiguous()):
            return self._forward(rows).float()

    def features(self, rows: Rows) -> Tensor:
        """Returns the inputs of the LM head at the target positions, or its logits if the head is not linear.

        A linear head is not run here, because most tokens of a padded batch are not targets.
        """
        if not self._head_is_linear:
            with self._head_reads(lambda states: states[:, -_width(rows) :]):
                return selected(self._forward(rows).flatten(0, 1), rows)
        inputs: list[Tensor] = []

        def pick(states: Tensor) -> Tensor:
            inputs.append(selected(states[:, -_width(rows) :].flatten(0, 1), rows))  # (positions, width)
            return inputs[0][:0, None]  # the head then runs on zero tokens

        with self._head_reads(pick):
            self._forward(rows)
        return inputs[0]

    def head(self, features: Tensor) -> Tensor:
        if not self._head_is_linear:
            return features
        bias = getattr(self.model, "final_logits_bias", None)  # in BART and similar models
        logits = self._head(features)
        return logits if bias is None else logits + bias

    def near_tie(self, features: Tensor) -> float:
        """Returns the difference of two scores, computed from these features, that rounding may reverse."""
        return NEAR_TIE["cpu" if self.device.type == "cpu" and features.dtype == torch.float32 else "cuda"]

    def losses(self, rows: Rows) -> Tensor:
        assert rows.labels is not None
        token_losses = F.cross_entropy(
            self.logits(rows).transpose(1, 2), rows.labels, ignore_index=NO_TARGET, reduction="none"
        )  # (rows, tokens)
        return token_losses.sum(-1) / (rows.labels != NO_TARGET).sum(-1)

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Returns True if `head` gives the model's own logits. It does not if these are capped or scaled (Gemma 2).

        The head is tested on large inputs, for which a cap makes a difference.
        """
        inputs: list[Tensor] = []

        def enlarge(states: Tensor) -> Tensor:
            inputs.append(torch.full_like(states, 100.0))
            return inputs[0]

        with self._head_reads(enlarge):
            logits = self._forward_one()
        return torch.allclose(self.head(inputs[0]).float(), logits.float(), rtol=0.02, atol=0.1)

    @contextmanager
    def _head_reads(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Makes the LM head read `change(states)` instead of the hidden states, for a `with` block."""
        hook = self._head.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
        try:
            yield
        finally:
            hook.remove()

    @property
    def _head(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        assert head is not None
        return head

    def _decoded(self, sequences: list[list[int]]) -> list[str]:
        """Decodes sequences to texts. Texts are cached, because the same answers occur many times."""
        padding = self.tokenizer.pad_token_id
        keys = [tuple(dropwhile(lambda token: token == padding, reversed(ids)))[::-1] for ids in sequences]
        if len(self._texts) > MAX_DECODED:
            self._texts.clear()
        unknown = [ids for ids in dict.fromkeys(keys) if ids not in self._texts]
        if unknown:
            self._texts.update(zip(unknown, self._spelled([list(ids) for ids in unknown]), strict=True))
        return [self._texts[ids] for ids in keys]

    def check_target(self, target: str) -> str:
        if not target.strip():
            raise InputError("expected a target answer, found an empty one; give the answer that the model should give")
        (ids,) = self.encode_targets([target])
        if len(ids) > self.max_answer_tokens:
            raise InputError(
                f"the model answers in at most {self.max_answer_tokens} tokens, this target has {len(ids)}; shorten it"
            )
        (spelled,) = self._spelled([ids])
        if not same(spelled, target):
            raise InputError(f"the model's tokenizer turns {target!r} into {spelled!r}; use other words")
        return target

    def valid_targets(self, texts: Sequence[str]) -> set[str]:
        distinct = [text for text in dict.fromkeys(texts) if text.strip()]
        try:
            encoded = self.encode_targets(distinct)
        except InputError:  # one of them cannot be encoded
            return {text for text in distinct if self._accepts(text)}
        return {
            text
            for text, ids, spelling in zip(distinct, encoded, self._spelled(encoded), strict=True)
            if len(ids) <= self.max_answer_tokens and same(spelling, text)
        }

    def _accepts(self, target: str) -> bool:
        try:
            self.check_target(target)
        except InputError:
            return False
        return True


def _width(rows: Rows) -> int:
    assert rows.labels is not None
    return rows.labels.shape[1]
