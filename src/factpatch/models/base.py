"""TaskModel: a Hugging Face model with a decision rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from factpatch.backends import no_cudnn_attention
from factpatch.engine import edited
from factpatch.errors import InputError, ModelError
from factpatch.facts import FactEdit, same
from factpatch.models.rows import Encoded, Rows, in_batches, padded
from factpatch.models.stored import StoredModel, exclusive
from factpatch.patch import Patch, stack_patches

# Tokens per inference batch, padding included: enough to keep the device busy, few enough to fit beside a base model.
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 262_144}
MOST_SPECIAL_TOKENS = 8  # a tokenizer adds at most this many special tokens to a text
MAX_PREDICTION_TOKENS = 4096  # limit for a prediction given by the user: editors read it, and each token needs memory
PATCHES_PER_BATCH = 32  # different patches in one forward pass


class _Scoped(Protocol):
    """A ledger that knows which of its facts an input is about."""

    def predict_scoped(self, inputs: Sequence[str]) -> list[str]: ...


class TaskModel(StoredModel):
    """A model together with its tokenizer and its way of answering."""

    kind: ClassVar[str]
    beams: ClassVar[int] = 1  # width of the beam search
    near_ties: ClassVar[bool] = True  # whether rounding in bf16 can change which of several close outputs wins
    auto_class: ClassVar[Any]  # the transformers class that loads such a model
    most_added_tokens: int = MOST_SPECIAL_TOKENS  # encoding adds at most this many tokens to those of the text itself
    held_out: frozenset[str] | None = None  # ids of the records that `fit` did not train on, if it made this model

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model, tokenizer)
        embeddings = len(self.word_embeddings)  # a tokenizer can have more tokens, such as added ones
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= embeddings:
            padding = model.config.pad_token_id if model.config.pad_token_id is not None else tokenizer.eos_token_id
            if padding is None:
                raise ModelError("the tokenizer has neither a padding nor an end token; give it one and save it")
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.max_input_tokens = _input_limit(model, tokenizer)

    # What each kind of model defines

    @abstractmethod
    def encode_targets(self, targets: Sequence[str]) -> list[Any]:
        """Encodes each target for a batch: as a class id, or as token ids."""

    @abstractmethod
    def collate(self, encoded: Sequence[Encoded], targets: Sequence[Any] | None = None) -> Rows:
        """Pads encoded texts, and their encoded targets if given, to one batch."""

    @abstractmethod
    def logits(self, rows: Rows) -> Tensor:
        """Returns float32 scores of the labels, (rows, labels), or at each target token, (rows, tokens, vocabulary)."""

    @abstractmethod
    def features(self, rows: Rows) -> Tensor:
        """Returns the inputs of `head` at each target position: (positions, width).

        Features are much narrower than the scores of a whole vocabulary, so many of them can be kept.
        """

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """Turns features into logits in the model's precision: (positions, labels or vocabulary)."""

    def scores(self, features: Tensor) -> Tensor:
        """Turns features into logits in float32: (positions, labels or vocabulary)."""
        return self.head(features).float()

    def answers_from(self, features: Tensor) -> list[str] | None:
        """Returns the answer at each position if the features alone decide it, or None if answering needs a search."""
        return None

    @abstractmethod
    def losses(self, rows: Rows) -> Tensor:
        """Returns the cross-entropy of each row's target, averaged over its tokens: (rows,)."""

    @abstractmethod
    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        """Applies the decision rule: the `count` best outputs of each row, best first.

        With `edits`, the rows run under that many edits, edit-major, and a beam search may drop finished rows.
        """

    def decide_scored(
        self, rows: Rows, count: int = 1, edits: int | None = None
    ) -> list[list[tuple[str, float | None]]]:
        """Returns what `decide` does, with each output's log-probability, or None if the search did not compute it."""
        return [[(text, None) for text in ranked] for ranked in self.decide(rows, count, edits)]

    def answers_to_confirm(self, encoded: Sequence[Encoded]) -> list[tuple[str, list[int]]] | None:
        """Returns the model's answers with their tokens, as labels for `still_answers`.

        None if confirming an answer needs a search.
        """
        return None

    def still_answers(self, rows: Rows, features: Tensor) -> Tensor:
        """Returns for each row whether its features show that the decision rule outputs its label: (rows,)."""
        return torch.zeros(len(rows), dtype=torch.bool, device=self.device)

    @abstractmethod
    def check_target(self, target: str) -> str:
        """Returns the target as the model would output it, or raises an InputError if it cannot."""

    @abstractmethod
    def valid_targets(self, texts: Sequence[str]) -> set[str]:
        """Returns the texts that `check_target` accepts."""

    # What all kinds share

    def predict(self, inputs: Sequence[str], cut: bool = False) -> list[str]:
        """Returns the model's answer to each input. With `cut`, inputs too long for the model are truncated."""
        return [ranked[0] for ranked in self.candidates(inputs, count=1, cut=cut)]

    def candidates(self, inputs: Sequence[str], count: int = 5, cut: bool = False) -> list[list[str]]:
        """Returns the `count` best outputs for each input, best first."""
        encoded = self.encode(inputs, self.max_input_tokens) if cut else self.encode_checked(inputs)
        return self.candidates_encoded(encoded, count)

    @exclusive
    @torch.no_grad()
    @no_cudnn_attention()
    def candidates_encoded(self, encoded: Sequence[Encoded], count: int = 5) -> list[list[str]]:
        """Returns the `count` best outputs for each encoded text, computed in batches of texts of similar length."""
        ranked: list[list[str]] = [[] for _ in encoded]
        for batch in self.batches([len(one["input_ids"]) for one in encoded], self.sequences(count)):
            decided = self._decide_in_parts([encoded[i] for i in batch], count)
            for i, outputs in zip(batch, decided, strict=True):
                ranked[i] = outputs
        return ranked

    def _decide_in_parts(self, encoded: Sequence[Encoded], count: int) -> list[list[str]]:
        """Decides a batch as a whole or, if it does not fit into the GPU's memory, in halves."""
        try:
            return self.decide(self.collate(encoded), count, edits=1)
        except torch.cuda.OutOfMemoryError:
            if len(encoded) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(encoded) // 2
        return self._decide_in_parts(encoded[:half], count) + self._decide_in_parts(encoded[half:], count)

    def predict_scoped(self, ledger: _Scoped, inputs: Sequence[str]) -> list[str]:
        """Answers each input under the patch of the ledger's fact that it is about, or unpatched if there is none."""
        return ledger.predict_scoped(inputs)

    @exclusive
    @torch.no_grad()
    @no_cudnn_attention()
    def predict_patched(self, patches: Sequence[Patch], inputs: Sequence[str]) -> list[str]:
        """Returns the model's answer to each input under that input's own patch. The weights are not changed."""
        if len(patches) != len(inputs):
            raise InputError(f"expected one patch per input, found {len(patches)} patches and {len(inputs)} inputs")
        for patch in {id(patch): patch for patch in patches}.values():
            patch.check_fits(self)
        answers: list[str] = []
        for batch in in_batches(list(zip(patches, inputs, strict=True)), PATCHES_PER_BATCH):
            with edited(self.layers, stack_patches([patch for patch, _ in batch], self.layers)):
                decided = self.decide(self.rows([text for _, text in batch]), edits=len(batch))
            answers += [ranked[0] for ranked in decided]
        return answers

    def rows(self, inputs: Sequence[str], targets: Sequence[str] | None = None) -> Rows:
        """Encodes texts, and the target of each if given, as one padded batch."""
        return self.collate(self.encode(inputs), None if targets is None else self.encode_targets(targets))

    def encode(self, texts: Sequence[str], limit: int | None = None) -> list[Encoded]:
        """Tokenises each text without padding, and truncates texts of more than `limit` tokens."""
        if not texts:
            return []
        if limit is not None and limit <= (special := self.tokenizer.num_special_tokens_to_add()):
            raise InputError(f"max_tokens={limit} leaves no room for a text beside {special} special tokens; raise it")
        truncation: dict[str, Any] = {"truncation": True, "max_length": limit} if limit else {}
        columns = self.tokenizer(list(texts), verbose=False, **truncation)
        self.refuse_unknown_tokens(texts, columns["input_ids"])
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def refuse_unknown_tokens(self, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
        """Raises an InputError if one of the texts has a token that the model has no embedding for."""
        for text, ids in zip(texts, encoded, strict=True) if self._unknown_tokens else ():
            if unknown := self._unknown_tokens.intersection(ids):
                name = self.tokenizer.convert_ids_to_tokens(min(unknown))
                raise InputError(f"the model has no embedding for the token {name!r} in {text[:60]!r}; reword it")

    def _has_known_tokens(self, text: str) -> bool:
        return not self._unknown_tokens or self._unknown_tokens.isdisjoint(self.tokenizer(text)["input_ids"])

    @cached_property
    def _unknown_tokens(self) -> frozenset[int]:
        """The added tokens of the tokenizer that the model has no embedding for."""
        added: dict[str, int] = self.tokenizer.get_added_vocab()  # pyright: ignore[reportOptionalCall]
        return frozenset(token for token in added.values() if token >= len(self.word_embeddings))

    def encode_checked(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokenises each text. Raises an InputError if one is empty or too long for the model."""
        encoded = self.encode(texts)
        for text, one in zip(texts, encoded, strict=True):
            self._check(text, len(one["input_ids"]))
        return encoded

    def padded_inputs(self, encoded: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pads encoded texts on the right and returns the arguments of the model's forward pass."""
        padding = {"input_ids": self.tokenizer.pad_token_id or 0}
        return {key: padded([one[key] for one in encoded], padding.get(key, 0), self.device) for key in encoded[0]}

    def sequences(self, count: int) -> int:
        """Returns the number of sequences that the model follows per text to find its `count` best outputs."""
        return self.beams

    def batches(
        self, lengths: Sequence[int], sequences: int | None = None, tokens: dict[str, int] = TOKENS_PER_BATCH
    ) -> Iterator[list[int]]:
        """Groups texts, given their lengths in tokens, into batches of a size that suits the device, longest first.

        `sequences` is the number of sequences that the model follows per text, and `tokens` the number of tokens per
        batch, by type of device.
        """
        budget = tokens.get(self.device.type, tokens["cpu"])
        if self.device.type == "cuda":  # GPU memory must hold the scores of all sequences over the vocabulary
            budget //= sequences or self.sequences(1)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        start = 0
        while start < len(order):
            size = max(1, budget // max(1, lengths[order[start]]))
            yield order[start : start + size]
            start += size

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text."""
        return [len(one["input_ids"]) for one in self.encode(texts)]

    def check_input(self, text: str) -> None:
        """Raises an InputError if the text is empty or too long for the model."""
        if self._unknown_tokens:
            self.encode([text])  # refuses a text that has one of them
        self._check(text, self._tokens_unless_short(text))

    def _tokens_unless_short(self, text: str) -> int:
        """Returns the number of tokens of a text, or 0 if it is so short that the model can certainly read it."""
        # An ASCII character becomes at most one token and any other at most 18 (some normalise to whole phrases), so
        # most texts are known to fit without tokenising them.
        certainly_fits = (1 if text.isascii() else 18) * len(text) + self.most_added_tokens <= self.max_input_tokens
        return 0 if certainly_fits else self.lengths([text])[0]

    def _check(self, text: str, tokens: int) -> None:
        if not text.strip():
            raise InputError("expected an input text, found an empty one; give the question or claim to edit")
        if tokens > self.max_input_tokens:
            raise InputError(
                f"the model reads at most {self.max_input_tokens} tokens, this input has {tokens}; "
                f"shorten it: {text[:60]!r}..."
            )

    def encode_readable(self, texts: Sequence[str]) -> dict[str, Encoded]:
        """Encodes the texts that are neither empty nor too long for the model, and drops all others."""
        distinct = [text for text in dict.fromkeys(texts) if text.strip() and self._has_known_tokens(text)]
        encoded = zip(distinct, self.encode(distinct), strict=True)
        return {text: one for text, one in encoded if len(one["input_ids"]) <= self.max_input_tokens}

    def resolve(self, edits: Sequence[FactEdit]) -> list[FactEdit]:
        """Checks the edits and fills in the model's own prediction where `y` is missing."""
        resolved: list[FactEdit] = []
        for edit in self.resolve_each(edits):
            if isinstance(edit, InputError):
                raise edit
            resolved.append(edit)
        return resolved

    def resolve_each(self, edits: Sequence[FactEdit]) -> list[FactEdit | InputError]:
        """Resolves edits like `resolve`, with an error in the place of each edit that cannot be made."""
        checked = list(map(self._checked, edits))
        unknown = [i for i, edit in enumerate(checked) if isinstance(edit, FactEdit) and edit.y is None]
        predicted = dict(zip(unknown, self.predict([edits[i].x for i in unknown]), strict=True))
        return [
            _with_prediction(edit, predicted.get(i, edit.y)) if isinstance(edit, FactEdit) else edit
            for i, edit in enumerate(checked)
        ]

    def _checked(self, edit: FactEdit) -> FactEdit | InputError:
        """Returns the edit with its target as the model would output it, or the error if the edit is invalid."""
        try:
            self.check_input(edit.x)
            if edit.y is not None and (tokens := self._tokens_unless_short(edit.y)) > MAX_PREDICTION_TOKENS:
                raise InputError(f"the prediction has {tokens} tokens, at most {MAX_PREDICTION_TOKENS} fit; shorten it")
            return replace(edit, a=self.check_target(edit.a))
        except InputError as error:
            return error


def _with_prediction(edit: FactEdit, prediction: str | None) -> FactEdit | InputError:
    if same(edit.a, prediction or ""):
        return InputError(
            f"the model already says {prediction!r} to {edit.x!r}; give a target that differs from its prediction"
        )
    return replace(edit, y=prediction)


def _input_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the longest input in tokens that position embeddings and tokenizer allow, or 1024 without a limit."""
    limit = tokenizer.model_max_length
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:
        embeddings = next((m for n, m in model.named_modules() if n.endswith("position_embeddings")), None)
        padding = getattr(embeddings, "padding_idx", None)
        # RoBERTa and its relatives start counting positions after the padding index.
        limit = min(limit, positions if padding is None else positions - padding - 1)
    return limit if limit < 1_000_000 else 1024
