"""TaskModel: a Hugging Face model with a decision rule."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from factpatch.backends import no_cudnn_attention
from factpatch.device import to_device
from factpatch.engine import edited
from factpatch.errors import InputError, ModelError
from factpatch.facts import FactEdit, same
from factpatch.files import atomic_folder
from factpatch.models.gpu import suit_gpu
from factpatch.models.layers import editable_layers
from factpatch.models.workers import Workers
from factpatch.patch import Patch, fingerprint, hash_tensors, stack_patches

# Padded tokens of one inference batch: enough to keep the device busy, little enough to fit beside a base-sized model.
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 262_144}

NO_TARGET = -100  # label that cross_entropy ignores
POSITIONS_AT_ONCE = 8192  # target positions whose scores over a whole vocabulary are in memory together
PATCHES_PER_BATCH = 32  # different patches in one forward
Encoded = dict[str, list[int]]  # one text: token numbers, attention mask and what else the model's forward takes


@dataclass(frozen=True)
class Rows:
    """A padded batch on the model's device."""

    inputs: dict[str, Tensor]  # what the model's forward takes, each (rows, tokens)
    labels: Tensor | None = None  # (rows,) class numbers, or (rows, tokens) with -100 where there is no target
    target_positions: Tensor | None = (
        None  # the targets that count, numbered through rows and their tokens; all, if left out
    )

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


class TaskModel(ABC):
    """What edits, patches, training and evaluation know of a model. It is kept frozen and in eval mode."""

    kind: ClassVar[str]
    beams: ClassVar[int] = 1  # that are searched with for one output
    near_ties: ClassVar[bool] = True  # whether its search meets them, which bf16 decides anew with every batch
    auto_class: ClassVar[Any]  # the transformers class that loads such a model

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model = model.eval().requires_grad_(False)
        suit_gpu(model)
        self.tokenizer = tokenizer
        self._encode_shared = Workers(partial(_encode, tokenizer))
        self.layers: dict[str, nn.Module] = editable_layers(model)
        self.patches: list[Patch] = []
        self.originals: dict[str, Tensor] = {}
        if tokenizer.pad_token_id is None:
            fill = model.config.pad_token_id if model.config.pad_token_id is not None else tokenizer.eos_token_id
            if fill is None:
                raise ModelError("the tokenizer has neither a padding nor an end token; give it one and save it")
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(fill)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.max_input_tokens = _input_limit(model, tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Of the editable weights as loaded; patches do not change it."""
        return fingerprint(self.layers)

    @cached_property
    def identity(self) -> str:
        """Of all weights as loaded, labels and ways to search: models of one identity answer alike."""
        settings = (self.model.config, getattr(self.model, "generation_config", None))
        texts = [setting.to_json_string() for setting in settings if setting is not None]
        return hashlib.sha256("".join([hash_tensors(self.model.state_dict()), *texts]).encode()).hexdigest()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def word_embeddings(self) -> Tensor:
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings.weight, Tensor)
        return embeddings.weight

    def cast(self, dtype: torch.dtype) -> TaskModel:
        """Another precision; the fingerprint stays that of the weights as stored."""
        _ = self.fingerprint
        self.model.to(dtype)
        return self

    @contextmanager
    def in_precision(self, dtype: torch.dtype) -> Iterator[TaskModel]:
        """Runs a block with the weights in another precision, and restores them bit by bit."""
        if dtype == self.model.dtype:
            yield self
            return
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        stored = self.model.dtype
        try:
            yield self.cast(dtype)
        finally:
            self.cast(stored).model.load_state_dict(before)

    def save(self, folder: str | Path) -> None:
        """An ordinary Hugging Face folder, patches included in the weights."""
        with atomic_folder(folder) as scratch:
            self.write_to(scratch)

    def write_to(self, folder: Path) -> None:
        """The same into a folder that is there."""
        self.model.save_pretrained(folder)
        try:
            self.tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers, in Rust, has no other kind
            if "os error" not in str(error):
                raise
            raise OSError(str(error)) from error

    # What each kind of model answers

    @abstractmethod
    def encode_targets(self, targets: Sequence[str]) -> list[Any]:
        """Each target as it goes into a batch: a class number, or token numbers."""

    @abstractmethod
    def collate(self, encoded: Sequence[Encoded], targets: Sequence[Any] | None = None) -> Rows:
        """Encoded texts, and where given their encoded targets, as one padded batch."""

    @abstractmethod
    def logits(self, rows: Rows) -> Tensor:
        """Scores of the labels, (rows, labels), or of each target token, (rows, tokens, vocabulary)."""

    @abstractmethod
    def features(self, rows: Rows) -> Tensor:
        """What `scores` makes logits of, at each of the rows' places: (places, width).

        A narrow thing to keep where the logits of a whole vocabulary would be a thousand times as much.
        """

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """The logits of features, in the model's precision: (places, labels or vocabulary)."""

    def scores(self, features: Tensor) -> Tensor:
        """The same in float32."""
        return self.head(features).float()

    def said(self, features: Tensor) -> list[str] | None:
        """What their scores alone decide, a text for each place; None where deciding takes a search."""
        return None

    @abstractmethod
    def losses(self, rows: Rows) -> Tensor:
        """Plain cross-entropy of each row's target, averaged over the row's target tokens: (rows,)."""

    @abstractmethod
    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        """The decision rule: the `count` best outputs of each row, best first.

        Where it is said under how many `edits` the rows run, edit-major, those that are answered may leave early.
        """

    @abstractmethod
    def check_target(self, target: str) -> str:
        """The target as the model would say it, or an InputError."""

    @abstractmethod
    def sayable(self, texts: Sequence[str]) -> set[str]:
        """Those of the texts that `check_target` lets pass; what the model has said may be too long to teach."""

    # What follows from it

    def predict(self, inputs: Sequence[str], cut: bool = False) -> list[str]:
        """What the model says to each input; with `cut` also to inputs that are longer than it can read, shortened."""
        return [ranked[0] for ranked in self.candidates(inputs, count=1, cut=cut)]

    def candidates(self, inputs: Sequence[str], count: int = 5, cut: bool = False) -> list[list[str]]:
        """The `count` best outputs for each input, best first."""
        encoded = self.encode(inputs, self.max_input_tokens if cut else None)
        if not cut:
            for text, one in zip(inputs, encoded, strict=True):
                self._check(text, len(one["input_ids"]))
        return self.rank(encoded, count)

    @torch.no_grad()
    @no_cudnn_attention()
    def rank(self, encoded: Sequence[Encoded], count: int = 5) -> list[list[str]]:
        """The same for encoded texts; those of like length share a batch."""
        found: list[list[str]] = [[] for _ in encoded]
        for batch in self.batches([len(one["input_ids"]) for one in encoded]):
            decided = self._decide_in_parts([encoded[i] for i in batch], count)
            for i, outputs in zip(batch, decided, strict=True):
                found[i] = outputs
        return found

    def _decide_in_parts(self, encoded: Sequence[Encoded], count: int) -> list[list[str]]:
        """In one batch, or in halves where that does not fit into the GPU's memory."""
        try:
            return self.decide(self.collate(encoded), count, edits=1)
        except torch.cuda.OutOfMemoryError:
            if len(encoded) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(encoded) // 2
        return self._decide_in_parts(encoded[:half], count) + self._decide_in_parts(encoded[half:], count)

    @torch.no_grad()
    @no_cudnn_attention()
    def predict_patched(self, patches: Sequence[Patch], inputs: Sequence[str]) -> list[str]:
        """What the model says to each input under that input's own patch; the weights stay as they are."""
        if len(patches) != len(inputs):
            raise InputError(f"expected a patch for each input, found {len(patches)} patches and {len(inputs)} inputs")
        for patch in {id(patch): patch for patch in patches}.values():
            patch.check_fits(self)
        said: list[str] = []
        for start in range(0, len(inputs), PATCHES_PER_BATCH):
            part = slice(start, start + PATCHES_PER_BATCH)
            with edited(self.layers, stack_patches(patches[part], self.layers)):
                said += [ranked[0] for ranked in self.decide(self.rows(inputs[part]), edits=len(inputs[part]))]
        return said

    def rows(self, inputs: Sequence[str], targets: Sequence[str] | None = None) -> Rows:
        """Texts, and where given what the model should say to each, as one padded batch."""
        return self.collate(self.encode(inputs), None if targets is None else self.encode_targets(targets))

    def encode(self, texts: Sequence[str], limit: int | None = None) -> list[Encoded]:
        """Each text as the model's inputs, not yet padded; `limit` cuts long ones."""
        if not texts:
            return []
        if limit is not None and limit <= (special := self.tokenizer.num_special_tokens_to_add()):
            raise InputError(f"max_tokens={limit} leaves no room for a text beside {special} special tokens; raise it")
        return _encode(self.tokenizer, texts, limit) if self.tokenizer.is_fast else self._encode_shared(texts, limit)

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of texts, longest first, cut where a padded batch would grow past what the device takes well."""
        budget = TOKENS_PER_BATCH.get(self.device.type, TOKENS_PER_BATCH["cpu"])
        if self.device.type == "cuda":  # whose memory holds all beams' scores of a vocabulary
            budget //= self.beams
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        start = 0
        while start < len(order):
            size = max(1, budget // max(1, lengths[order[start]]))
            yield order[start : start + size]
            start += size

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens the model reads of each text."""
        return [len(one["input_ids"]) for one in self.encode(texts)]

    def check_input(self, text: str) -> None:
        # A character becomes 18 tokens at most (some normalise to whole phrases), one of ASCII a single one; so most
        # texts need not be tokenised to know that they fit.
        fits_surely = (1 if text.isascii() else 18) * len(text) + 8 <= self.max_input_tokens
        self._check(text, 0 if fits_surely else self.lengths([text])[0])

    def _check(self, text: str, tokens: int) -> None:
        if not text.strip():
            raise InputError("expected an input text, found an empty one; give the question or claim to edit")
        if tokens > self.max_input_tokens:
            raise InputError(
                f"the model reads at most {self.max_input_tokens} tokens, this input has {tokens}; "
                f"shorten it: {text[:60]!r}..."
            )

    def readable(self, texts: Sequence[str]) -> dict[str, Encoded]:
        """Those of the texts that are neither empty nor too long for the model, encoded."""
        there = [text for text in dict.fromkeys(texts) if text.strip()]
        encoded = zip(there, self.encode(there), strict=True)
        return {text: one for text, one in encoded if len(one["input_ids"]) <= self.max_input_tokens}

    def resolve(self, edits: Sequence[FactEdit]) -> list[FactEdit]:
        """The edits checked, with the model's own prediction filled in where `y` is missing."""
        for edit in edits:
            self.check_input(edit.x)
        targets = [self.check_target(edit.a) for edit in edits]
        unknown = [i for i, edit in enumerate(edits) if edit.y is None]
        predicted = dict(zip(unknown, self.predict([edits[i].x for i in unknown]), strict=True))
        resolved = [
            replace(edit, a=target, y=predicted.get(i, edit.y))
            for i, (edit, target) in enumerate(zip(edits, targets, strict=True))
        ]
        for edit in resolved:
            if same(edit.a, edit.y or ""):
                raise InputError(
                    f"the model already says {edit.y!r} to {edit.x!r}; give a target that differs from its prediction"
                )
        return resolved


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None) -> list[Encoded]:
    cut: dict[str, Any] = {"truncation": True, "max_length": limit} if limit else {}
    columns = tokenizer(list(texts), verbose=False, **cut)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def padded(ids: list[list[int]], fill: int, device: torch.device) -> Tensor:
    """Lists of token ids as one tensor, filled up on the right."""
    filled = np.full((len(ids), max(map(len, ids), default=0)), fill, dtype=np.int64)
    for row, own in zip(filled, ids, strict=True):
        row[: len(own)] = own
    return to_device(device, filled)


def padded_inputs(model: TaskModel, encoded: Sequence[Encoded]) -> dict[str, Tensor]:
    """The model's inputs, padded on the right whatever the tokenizer prefers: rows are not continued."""
    fills = {"input_ids": model.tokenizer.pad_token_id or 0}
    return {key: padded([one[key] for one in encoded], fills.get(key, 0), model.device) for key in encoded[0]}


def _input_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens the model reads: what its positions and its tokenizer allow; relative positions have no end."""
    positions = getattr(model.config, "max_position_embeddings", None)
    embeddings = next((m for n, m in model.named_modules() if n.endswith("position_embeddings")), None)
    offset = getattr(embeddings, "padding_idx", None)
    limits = [tokenizer.model_max_length]
    if positions is not None and positions > 0:
        # RoBERTa and its kin start counting positions after the padding index.
        limits.append(positions - (offset + 1 if offset is not None else 0))
    limit = min(limits)
    return limit if limit < 1_000_000 else 1024
