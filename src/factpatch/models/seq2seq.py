"""Encoder-decoders, such as closed-book question answering models: the answer is a text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from factpatch.models.beam import (
    banned_tokens,
    beam_search,
    finds_most_likely,
    gives_probabilities,
    length_penalty,
    supports,
)
from factpatch.models.decoding import EncoderDecoderSteps
from factpatch.models.rows import NO_TARGET, POSITIONS_PER_BATCH, Encoded, Rows, in_batches, padded
from factpatch.models.text import MAX_ANSWER_TOKENS, TextModel

# Generation settings that do not affect the answers, because they change only speed or output or are overridden below.
_NOT_DECISIVE = {"transformers_version", "use_cache", "return_dict_in_generate", "max_length", "num_beams", "do_sample"}


class Seq2Seq(TextModel):
    """Answers with the best sequence of a beam search with five beams."""

    kind = "seq2seq"
    auto_class = AutoModelForSeq2SeqLM

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The model's own generation settings, except that it always uses beam search, never greedy search or sampling.
        self.generation = copy.deepcopy(self.model.generation_config)
        self.generation.update(num_beams=self.beams, do_sample=False)
        self.generation.max_length = None
        if isinstance(end := self.generation.eos_token_id, list) and len(end) == 1:
            (self.generation.eos_token_id,) = end
        self.limit_answers(self.generation.max_new_tokens or MAX_ANSWER_TOKENS)

    def decision_settings(self) -> dict[str, Any]:
        settings = self.model.generation_config.to_diff_dict()
        return {k: v for k, v in settings.items() if k not in _NOT_DECISIVE and not k.startswith(("_", "output_"))}

    def limit_answers(self, tokens: int) -> None:
        """Sets the maximum length of an answer in tokens."""
        self.max_answer_tokens = self.generation.max_new_tokens = tokens

    def fit_answers(self, tokens: int) -> None:
        self.limit_answers(tokens)
        self.generation.length_penalty = 0.0  # find the most likely answer, without a bonus for its length
        self.model.generation_config = self.generation

    def encode_targets(self, targets: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(text_target=list(targets))["input_ids"] if targets else []
        self.refuse_unknown_tokens(targets, encoded)
        return encoded

    def collate(self, encoded: Sequence[Encoded], targets: Sequence[list[int]] | None = None) -> Rows:
        labels = None if targets is None else padded(list(targets), NO_TARGET, self.device)
        return Rows(self.padded_inputs(encoded), labels)

    def _forward(self, rows: Rows) -> Tensor:
        assert rows.labels is not None
        return self.model(**rows.inputs, decoder_input_ids=self._shifted(rows.labels), use_cache=False).logits

    def _forward_one(self) -> Tensor:
        one = torch.ones((1, 1), dtype=torch.long, device=self.device)
        return self.model(input_ids=one, decoder_input_ids=one, use_cache=False).logits

    def _shifted(self, labels: Tensor) -> Tensor:
        """Returns the decoder's inputs: the target tokens shifted right by one."""
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            return prepare(labels=labels)
        start = torch.full_like(labels[:, :1], self.generation.decoder_start_token_id or 0)
        padding = self.tokenizer.pad_token_id or 0
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == NO_TARGET, padding)], 1)

    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        count = min(count, self.beams)
        texts = self._decoded(self._search(rows, count, edits)[0].tolist())
        return list(in_batches(texts, count))

    def decide_scored(
        self, rows: Rows, count: int = 1, edits: int | None = None
    ) -> list[list[tuple[str, float | None]]]:
        count = min(count, self.beams)
        ids, scores = self._search(rows, count, edits)
        sequences = ids.tolist()
        texts = self._decoded(sequences)
        distinct = list(dict.fromkeys(texts))
        targets = dict(zip(distinct, self.encode_targets(distinct), strict=True))
        exact = gives_probabilities(self.generation)
        scored = [
            (text, self._log_probability(targets[text], sequence, score) if exact else None)
            for text, sequence, score in zip(texts, sequences, scores.tolist(), strict=True)
        ]
        return list(in_batches(scored, count))

    def _search(self, rows: Rows, count: int, edits: int | None) -> tuple[Tensor, Tensor]:
        """Returns the best sequences and their scores in the search: (rows·count, 1 + tokens) and (rows·count,)."""
        if supports(self.generation):
            best = beam_search(EncoderDecoderSteps(self.model, rows.inputs), self.generation, edits, count=count)
            return best.sequences[:, :count].flatten(0, 1), best.scores[:, :count].flatten()
        generation = copy.copy(self.generation)
        generation.num_return_sequences = count
        ids = self.model.generate(**rows.inputs, generation_config=generation)
        return ids, torch.full((len(ids),), float("nan"))

    @torch.no_grad()
    def answers_to_confirm(self, encoded: Sequence[Encoded]) -> list[tuple[str, list[int]]] | None:
        if not finds_most_likely(self.generation):
            return None
        found: list[tuple[str, list[int]]] = [("", [])] * len(encoded)
        for batch in self.batches([len(one["input_ids"]) for one in encoded]):
            sequences = self._search(self.collate([encoded[i] for i in batch]), 1, edits=1)[0].tolist()
            for i, text, ids in zip(batch, self._decoded(sequences), sequences, strict=True):
                found[i] = text, self._until_end(ids[1:])
        return found

    def _until_end(self, ids: list[int]) -> list[int]:
        end = self.generation.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    @torch.no_grad()
    def still_answers(self, rows: Rows, features: Tensor) -> Tensor:
        """Returns for each row whether beam search is certain to find its label: (rows,).

        It is if the label is more likely than each of its deviations: its first tokens, up to any position, followed by
        another token. A sequence is at most as likely as its beginning, so nothing else can win, and the beams always
        hold the label. Near ties do not count: rounding decides them. Neither do labels that the model and the search
        begin with different tokens.
        """
        assert rows.labels is not None
        assert rows.target_positions is not None
        labels = rows.target_labels
        banned = banned_tokens(self.generation, self.device)
        own = torch.zeros(rows.labels.numel(), device=self.device)  # log-probabilities of the label's tokens
        other = torch.full_like(own, float("-inf"))  # and of the best other token in their place
        for start in range(0, len(labels), POSITIONS_PER_BATCH):
            part = slice(start, start + POSITIONS_PER_BATCH)
            positions, tokens = rows.target_positions[part], labels[part, None]
            scores = self.scores(features[part])
            if self.generation.renormalize_logits:  # the probabilities of all other tokens sum to one
                scores = scores.index_fill(1, banned, float("-inf"))
            norms = scores.logsumexp(-1)
            own[positions] = scores.gather(1, tokens).squeeze(1) - norms
            scores = scores.scatter(1, tokens, float("-inf")).index_fill_(1, banned, float("-inf"))
            other[positions] = scores.amax(-1) - norms
        own, other = own.view_as(rows.labels), other.view_as(rows.labels)
        for position, forced in (
            (0, self.generation.forced_bos_token_id),
            (self.max_answer_tokens - 1, self.generation.forced_eos_token_id),
        ):
            if forced is not None:  # its score is 0, and there is no other token
                own[:, position : position + 1] = 0
                other[:, position : position + 1] = float("-inf")
        likelihood = own.sum(1)
        deviations = own.cumsum(1) - own + other  # (rows, tokens)
        same_start = self._shifted(rows.labels)[:, 0].eq(self.generation.decoder_start_token_id)
        has_ended = rows.labels.eq(self.generation.eos_token_id).any(1)
        is_longest = rows.labels.ne(NO_TARGET).sum(1) == self.max_answer_tokens
        return same_start & (has_ended | is_longest) & likelihood.gt(deviations.amax(1) + self.near_tie(features))

    def _log_probability(self, target: list[int], sequence: list[int], score: float) -> float | None:
        """Computes a target's log-probability from the score of a sequence, or returns None if the tokens differ.

        At the maximum length the end token may have been forced, which the score does not count.
        """
        is_same = sequence[1 : 1 + len(target)] == target and target[-1] == self.generation.eos_token_id
        if not is_same or len(target) >= self.max_answer_tokens:
            return None
        return score * len(target) ** length_penalty(self.generation)

    def _spelled(self, targets: Sequence[list[int]]) -> list[str]:
        if not targets:
            return []
        decoded = self.tokenizer.batch_decode(list(targets), skip_special_tokens=True)
        return [text.strip() for text in decoded]
