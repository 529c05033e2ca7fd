"""Encoder-decoders, such as closed-book question answering models: the answer is a text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

from factpatch.errors import InputError
from factpatch.facts import same
from factpatch.models.base import TaskModel
from factpatch.models.beam import beam_search, knows
from factpatch.models.gpu import align
from factpatch.models.rows import NO_TARGET, Encoded, Rows, padded, selected

MAX_DECODED = 200_000  # answers whose texts are cached
MAX_ANSWER_TOKENS = 32  # unless the model's folder sets another limit

# Generation settings that do not change the answers, or that this class overrides.
_NOT_DECISIVE = {"transformers_version", "use_cache", "return_dict_in_generate", "max_length", "num_beams", "do_sample"}


class Seq2Seq(TaskModel):
    """Answers with the best sequence of a beam search with five beams."""

    kind = "seq2seq"
    auto_class = AutoModelForSeq2SeqLM
    beams = 5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._texts: dict[tuple[int, ...], str] = {}
        align(self._head)
        self._head_is_linear = True
        self._head_is_linear = self._check_head()
        # The model's own generation settings, except that it always uses beam search, never greedy search or sampling.
        self.generation = copy.deepcopy(self.model.generation_config)
        self.generation.update(num_beams=self.beams, do_sample=False)
        self.generation.max_length = None
        self.limit_answers(self.generation.max_new_tokens or MAX_ANSWER_TOKENS)

    def decision_settings(self) -> dict[str, Any]:
        settings = self.model.generation_config.to_diff_dict()
        return {k: v for k, v in settings.items() if k not in _NOT_DECISIVE and not k.startswith(("_", "output_"))}

    def limit_answers(self, tokens: int) -> None:
        """Sets the maximum length of an answer in tokens."""
        self.max_answer_tokens = self.generation.max_new_tokens = tokens

    def encode_targets(self, targets: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(text_target=list(targets))["input_ids"] if targets else []

    def collate(self, encoded: Sequence[Encoded], targets: Sequence[list[int]] | None = None) -> Rows:
        labels = None if targets is None else padded(list(targets), NO_TARGET, self.device)
        return Rows(self.padded_inputs(encoded), labels)

    def logits(self, rows: Rows) -> Tensor:
        return self._forward(rows).float()

    def _forward(self, rows: Rows) -> Tensor:
        assert rows.labels is not None
        return self.model(**rows.inputs, decoder_input_ids=self._shifted(rows.labels), use_cache=False).logits

    def features(self, rows: Rows) -> Tensor:
        """The inputs of the LM head at the target positions.

        The head itself is not run, because most tokens of a padded batch are not targets.
        """
        if not self._head_is_linear:
            return selected(self._forward(rows).flatten(0, 1), rows)
        read: list[Tensor] = []

        def pick(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            read.append(selected(args[0].flatten(0, 1), rows))  # (positions, width)
            return (read[0][:0, None],)  # the head itself then runs on zero tokens

        handle = self._head.register_forward_pre_hook(pick)
        try:
            self._forward(rows)
        finally:
            handle.remove()
        return read[0]

    def head(self, features: Tensor) -> Tensor:
        if not self._head_is_linear:
            return features
        bias = getattr(self.model, "final_logits_bias", None)  # in BART and similar models
        logits = self._head(features)
        return logits if bias is None else logits + bias

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Whether `head` gives the model's own logits. It does not if the model caps them, as T5Gemma does.

        The head is tested on large inputs, for which a cap makes a difference.
        """
        read: list[Tensor] = []

        def enlarge(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            read.append(torch.full_like(args[0], 100.0))
            return (read[0],)

        one = torch.ones((1, 1), dtype=torch.long, device=self.device)
        handle = self._head.register_forward_pre_hook(enlarge)
        try:
            own = self.model(input_ids=one, decoder_input_ids=one, use_cache=False).logits
        finally:
            handle.remove()
        return torch.allclose(self.head(read[0]).float(), own.float(), rtol=0.02, atol=0.1)

    @property
    def _head(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        assert head is not None
        return head

    def _shifted(self, labels: Tensor) -> Tensor:
        """The decoder's inputs: the target tokens shifted right by one."""
        own_way = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if own_way is not None:
            return own_way(labels=labels)
        start = torch.full_like(labels[:, :1], self.generation.decoder_start_token_id or 0)
        fill = self.tokenizer.pad_token_id or 0
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == NO_TARGET, fill)], 1)

    def losses(self, rows: Rows) -> Tensor:
        assert rows.labels is not None
        token_losses = F.cross_entropy(
            self.logits(rows).transpose(1, 2), rows.labels, ignore_index=NO_TARGET, reduction="none"
        )  # (rows, tokens)
        return token_losses.sum(-1) / (rows.labels != NO_TARGET).sum(-1)

    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        count = min(count, self.beams)
        if knows(self.generation):
            ids = beam_search(self.model, rows.inputs, self.generation, edits)[:, :count].flatten(0, 1)
        else:
            generation = copy.copy(self.generation)
            generation.num_return_sequences = count
            ids = self.model.generate(**rows.inputs, generation_config=generation)
        texts = self._decoded(ids.tolist())
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def _decoded(self, sequences: list[list[int]]) -> list[str]:
        """Decodes sequences to texts. Texts are cached, because many sequences are the same answer."""
        fill = self.tokenizer.pad_token_id
        keys = [tuple(ids[: next((n for n in range(len(ids), 0, -1) if ids[n - 1] != fill), 0)]) for ids in sequences]
        if len(self._texts) > MAX_DECODED:
            self._texts.clear()
        unknown = [ids for ids in dict.fromkeys(keys) if ids not in self._texts]
        if unknown:
            decoded = self.tokenizer.batch_decode([list(ids) for ids in unknown], skip_special_tokens=True)
            self._texts.update((ids, text.strip()) for ids, text in zip(unknown, decoded, strict=True))
        return [self._texts[ids] for ids in keys]

    def check_target(self, target: str) -> str:
        if not target.strip():
            raise InputError("expected a target answer, found an empty one; give the answer that the model should have")
        ids = self.tokenizer(text_target=target)["input_ids"]
        if len(ids) > self.max_answer_tokens:
            raise InputError(
                f"the model answers in at most {self.max_answer_tokens} tokens, this target has {len(ids)}; shorten it"
            )
        spelled = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        if not same(spelled, target):
            raise InputError(f"the model's tokenizer turns {target!r} into {spelled!r}; use other words")
        return target

    def valid_targets(self, texts: Sequence[str]) -> set[str]:
        different = [text for text in dict.fromkeys(texts) if text.strip()]
        encoded = self.encode_targets(different)
        spelled = self.tokenizer.batch_decode(encoded, skip_special_tokens=True) if encoded else []
        return {
            text
            for text, ids, spelling in zip(different, encoded, spelled, strict=True)
            if len(ids) <= self.max_answer_tokens and same(spelling, text)
        }
