"""TextModel: the common part of encoder-decoders and decoders, whose answers are texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.errors import InputError
from factpatch.facts import same
from factpatch.models.base import TaskModel
from factpatch.models.gpu import align
from factpatch.models.rows import NO_TARGET, Rows, selected

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
        self._head_is_linear = True
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
        """Returns the answer that each sequence of generated tokens stands for."""

    def logits(self, rows: Rows) -> Tensor:
        with self._head_reads(lambda states: states[:, -_width(rows) :]):
            return self._forward(rows).float()

    def features(self, rows: Rows) -> Tensor:
        """Returns the inputs of the LM head at the target positions.

        The head itself is not run, because most tokens of a padded batch are not targets.
        """
        if not self._head_is_linear:
            with self._head_reads(lambda states: states[:, -_width(rows) :]):
                return selected(self._forward(rows).flatten(0, 1), rows)
        read: list[Tensor] = []

        def pick(states: Tensor) -> Tensor:
            read.append(selected(states[:, -_width(rows) :].flatten(0, 1), rows))  # (positions, width)
            return read[0][:0, None]  # the head itself then runs on zero tokens

        with self._head_reads(pick):
            self._forward(rows)
        return read[0]

    def head(self, features: Tensor) -> Tensor:
        if not self._head_is_linear:
            return features
        bias = getattr(self.model, "final_logits_bias", None)  # in BART and similar models
        logits = self._head(features)
        return logits if bias is None else logits + bias

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
        read: list[Tensor] = []

        def enlarge(states: Tensor) -> Tensor:
            read.append(torch.full_like(states, 100.0))
            return read[0]

        with self._head_reads(enlarge):
            own = self._forward_one()
        return torch.allclose(self.head(read[0]).float(), own.float(), rtol=0.02, atol=0.1)

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
        """Decodes sequences to texts. Texts are cached, because many sequences are the same answer."""
        fill = self.tokenizer.pad_token_id
        keys = [tuple(ids[: next((n for n in range(len(ids), 0, -1) if ids[n - 1] != fill), 0)]) for ids in sequences]
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
        different = [text for text in dict.fromkeys(texts) if text.strip()]
        try:
            encoded = self.encode_targets(different)
        except InputError:  # one of them cannot be encoded
            return {text for text in different if self._accepts(text)}
        return {
            text
            for text, ids, spelling in zip(different, encoded, self._spelled(encoded), strict=True)
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
