"""Decoders, such as GPT-2, Llama and Qwen: the answer continues a prompt."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from factpatch.errors import InputError, ModelError
from factpatch.facts import FactEdit
from factpatch.files import read_text
from factpatch.models.base import MOST_SPECIAL_TOKENS
from factpatch.models.beam import beam_search
from factpatch.models.decoding import PromptSteps, greedy_search
from factpatch.models.rows import NO_TARGET, POSITIONS_PER_BATCH, Encoded, Rows, padded
from factpatch.models.stopping import Stops, cut
from factpatch.models.template import Template
from factpatch.models.text import MAX_ANSWER_TOKENS, TextModel

SETTINGS = "decoder.json"  # in the model's folder: the template and the maximum length of an answer


class Causal(TextModel):
    """Answers with the most likely token at each step, until the answer ends (see stopping.py).

    Alternatives come from a beam search with five beams. The rows' inputs are prompts, and their labels are the tokens
    of the targets and an end token. A forward pass reads prompt and target as one text:

        · · prompt prompt | target target ·     prompts are padded on the left, targets on the right
    """

    kind = "causal"
    auto_class = AutoModelForCausalLM
    template_is_fixed = False  # whether the folder that the model is saved to accepts no other template

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str | None = None):
        super().__init__(model, tokenizer)
        self.end_tokens = _predictable(_end_tokens(model, tokenizer), len(self.word_embeddings))
        self._most_tokens = self.max_input_tokens  # of prompt and answer together
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.set_template(template)

    def set_template(self, text: str | None, answer_tokens: int = MAX_ANSWER_TOKENS) -> None:
        """Sets how a question becomes a prompt (see Template), and the maximum length of an answer in tokens."""
        self.template = Template(text, self.tokenizer)
        self.prompt_template = self.template.text
        self._template_tokens = len(self._tokenized([""])[0]["input_ids"])
        self.most_added_tokens = self._template_tokens + MOST_SPECIAL_TOKENS
        self.limit_answers(answer_tokens)

    def decision_settings(self) -> dict[str, Any]:
        return {"template": self.template.text, "max_answer_tokens": self.max_answer_tokens, "end": self.end_tokens}

    def limit_answers(self, tokens: int) -> None:
        """Sets the maximum length of an answer in tokens, which must fit beside the prompt."""
        self.max_answer_tokens = tokens
        self.max_input_tokens = self._most_tokens - tokens
        if self.max_input_tokens <= self._template_tokens:
            raise ModelError(
                f"the model reads {self._most_tokens} tokens, too few for the template ({self._template_tokens} tokens)"
                f" and an answer ({tokens} tokens); use a shorter template"
            )

    def fit_answers(self, tokens: int) -> None:
        self.limit_answers(tokens)

    def write_to(self, folder: Path) -> None:
        super().write_to(folder)
        if not (self.template_is_fixed or self.template.text or self.patches):
            return  # such as a converted GGUF file, which works with any template
        settings = {"template": self.template.text, "max_answer_tokens": self.max_answer_tokens}
        (folder / SETTINGS).write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    # Prompts and targets

    def encode(self, texts: Sequence[str], limit: int | None = None) -> list[Encoded]:
        """Tokenises the prompt of each text. Texts of more than `limit` tokens, template excluded, are truncated."""
        encoded = self._tokenized(texts) if texts else []
        if limit is None:
            return encoded
        most = min(limit + self._template_tokens, self.max_input_tokens)
        return [
            one if len(one["input_ids"]) <= most else self._shortened(text, most)
            for text, one in zip(texts, encoded, strict=True)
        ]

    def _tokenized(self, texts: Sequence[str]) -> list[Encoded]:
        prompts = [self.template.prompt(text) for text in texts]
        special = not self.template.has_special_tokens
        found = self.tokenizer(prompts, verbose=False, add_special_tokens=special)["input_ids"]
        # Some tokenizers append an end token, after which there is nothing to continue.
        ids = [one[:-1] if special and one and one[-1] == self.tokenizer.eos_token_id else one for one in found]
        self.refuse_unknown_tokens(texts, ids)
        return [{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids]

    def _shortened(self, text: str, most: int) -> Encoded:
        """Encodes the prompt for the longest beginning of the text that fits."""
        ids = self.tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
        for kept in range(min(len(ids), most), -1, -1):
            (encoded,) = self._tokenized([str(self.tokenizer.decode(ids[:kept]))])
            if len(encoded["input_ids"]) <= most:
                return encoded
        raise InputError(f"the template alone has more than {most} tokens; use a shorter template")

    def encode_targets(self, targets: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each target as they follow a prompt, and an end token."""
        ending = self.template.ending
        texts = [ending, *(self._after(ending, target) for target in targets)]
        (start, *whole) = self.tokenizer(texts, verbose=False, add_special_tokens=False)["input_ids"]
        for target, ids in zip(targets, whole, strict=True):
            if ids[: len(start)] != start:
                raise _begins_inside_token(target, ending)
        self.refuse_unknown_tokens(targets, whole)
        return [[*ids[len(start) :], self.end_tokens[0]] for ids in whole]

    def _after(self, prompt: str, target: str) -> str:
        return prompt + self.template.space + target.strip()

    def resolve_each(self, edits: Sequence[FactEdit]) -> list[FactEdit | InputError]:
        resolved = super().resolve_each(edits)
        good = [(i, edit) for i, edit in enumerate(resolved) if isinstance(edit, FactEdit)]
        for (i, edit), encoded in zip(good, self.encode([edit.x for _, edit in good]), strict=True):
            prompt = self.template.prompt(edit.x)
            special = not self.template.has_special_tokens
            whole = self.tokenizer(self._after(prompt, edit.a), verbose=False, add_special_tokens=special)["input_ids"]
            if whole[: len(encoded["input_ids"])] != encoded["input_ids"]:
                resolved[i] = _begins_inside_token(edit.a, prompt)
        return resolved

    def collate(self, encoded: Sequence[Encoded], targets: Sequence[list[int]] | None = None) -> Rows:
        labels = None if targets is None else padded(list(targets), NO_TARGET, self.device)
        return Rows(self._aligned(self.padded_inputs(encoded)), labels)

    def _aligned(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Moves all padding of the prompts to the left, and adds the positions of their tokens."""
        mask = inputs["attention_mask"]
        width = mask.shape[1]
        trailing = mask.flip(1).argmax(1, keepdim=True)  # (rows, 1)  padding on the right
        order = (torch.arange(width, device=mask.device) - trailing) % width  # (rows, tokens)
        ids, mask = inputs["input_ids"].gather(1, order), mask.gather(1, order)
        return self._accepted({"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)})

    def _accepted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Leaves out positions for models that do not take them, such as those with ALiBi."""
        return {name: value for name, value in inputs.items() if self._takes_positions or name != "position_ids"}

    # Forward passes

    def joint_inputs(self, rows: Rows) -> dict[str, Tensor]:
        """Returns the forward pass's arguments for prompts followed by their targets.

        The last token of a target is predicted but not read.
        """
        assert rows.labels is not None
        prompts = self._aligned(rows.inputs)
        targets, is_read = rows.labels[:, :-1], rows.labels[:, 1:] != NO_TARGET
        ids = torch.cat([prompts["input_ids"], targets.masked_fill(~is_read, self.tokenizer.pad_token_id or 0)], 1)
        mask = torch.cat([prompts["attention_mask"], is_read.long()], 1)  # (rows, prompt + target tokens - 1)
        return self._accepted({"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)})

    def _forward(self, rows: Rows) -> Tensor:
        return self.model(**self.joint_inputs(rows), use_cache=False).logits

    def _forward_one(self) -> Tensor:
        one = torch.ones((1, 1), dtype=torch.long, device=self.device)
        return self.model(input_ids=one, use_cache=False).logits

    def _next_logits(self, **inputs: Any) -> Tensor:
        """Returns the logits after the last token, with cached keys and values: (rows, vocabulary)."""
        with self._head_reads(lambda states: states[:, -1:]):
            return self.model(**self._accepted(inputs), use_cache=True).logits[:, -1]

    # Answers

    def sequences(self, count: int) -> int:
        return 1 if count == 1 else self.beams

    @cached_property
    def _stops(self) -> Stops:
        return Stops(self.tokenizer, self.end_tokens, self._head.weight.shape[0])

    def _greedy(self, inputs: dict[str, Tensor], edits: int | None) -> list[list[int]]:
        """Returns the most likely tokens after each prompt, followed by padding."""
        stops, fill = self._stops.to(self.device), self.tokenizer.pad_token_id or 0
        steps = PromptSteps(self._next_logits, inputs)
        return greedy_search(steps, self.max_answer_tokens, stops, stops.first, fill, edits).tolist()

    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        inputs = self._aligned(rows.inputs)
        ranked = [[text] for text in self._decoded(self._greedy(inputs, edits))]
        if count == 1:
            return ranked
        stops = self._stops.to(self.device)
        generation = GenerationConfig(
            num_beams=self.beams,
            max_new_tokens=self.max_answer_tokens,
            length_penalty=0.0,  # the most likely answers, without a bonus for their length
            eos_token_id=self.end_tokens[0],
            pad_token_id=self.tokenizer.pad_token_id or 0,
            begin_suppress_tokens=stops.first.tolist(),
        )
        found = beam_search(PromptSteps(self._next_logits, inputs), generation, edits, stops).sequences
        texts = self._decoded(found[:, :, 1:].flatten(0, 1).tolist())
        for row, best in enumerate(ranked):
            others = dict.fromkeys(texts[row * self.beams : (row + 1) * self.beams])
            best += [text for text in others if text and text not in best][: count - 1]
        return ranked

    @torch.no_grad()
    def answers_to_confirm(self, encoded: Sequence[Encoded]) -> list[tuple[str, list[int]]]:
        """Returns the answers with their tokens, including the one that ends the answer."""
        found: list[tuple[str, list[int]]] = [("", [])] * len(encoded)
        for batch in self.batches([len(one["input_ids"]) for one in encoded], sequences=1):
            generated = self._greedy(self.collate([encoded[i] for i in batch]).inputs, edits=1)
            texts, tokens = self._decoded(generated), self._stops.shortened(generated)
            for i, text, ids in zip(batch, texts, tokens, strict=True):
                found[i] = text, ids
        return found

    @torch.no_grad()
    def still_answers(self, rows: Rows, features: Tensor) -> Tensor:
        """Returns for each row whether greedy search is certain to generate its label: (rows,).

        It is if each token is the most likely one after those before it. Near ties do not count: rounding decides them,
        and it differs between this forward pass and generation.
        """
        labels, row = rows.target_labels, rows.row_of_position
        is_first = torch.cat([row.new_ones(1), row.diff()]) > 0  # of its row
        certain = torch.empty_like(is_first)
        banned = self._stops.to(self.device).first
        near_tie = self.near_tie(features)
        for start in range(0, len(labels), POSITIONS_PER_BATCH):
            part = slice(start, start + POSITIONS_PER_BATCH)
            at_first = is_first[part].nonzero(), banned
            # A copy: the scores of models without a linear head are the features themselves.
            scores = self.scores(features[part]).index_put(at_first, features.new_tensor(float("-inf")).float())
            best = scores.topk(2)
            certain[part] = (best.indices[:, 0] == labels[part]) & (best.values.diff().squeeze(1) < -near_tie)
        return rows.sums((~certain).float()) == 0

    def _spelled(self, targets: Sequence[list[int]]) -> list[str]:
        if not targets:
            return []
        said = self._stops.shortened(targets)
        return [cut(text) for text in self.tokenizer.batch_decode(said, skip_special_tokens=True)]


def read_settings(folder: Path) -> tuple[str | None, int | None]:
    """Reads the template and the maximum length of an answer from a model's folder, if they are stored there."""
    path = folder / SETTINGS
    if not path.exists():
        return None, None
    try:
        stored = json.loads(read_text(path))
        template, tokens = stored["template"], stored["max_answer_tokens"]
        if not isinstance(template, str | None) or type(tokens) is not int or tokens < 1:
            raise ValueError("expected a template and a number of tokens")
        return template, tokens
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error}); fit the model again, or delete the file") from error


def _positions(mask: Tensor) -> Tensor:
    """Returns the position of each token in its text, counted without padding: (rows, tokens)."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all end tokens; the first is the one that targets end with."""
    config = model.generation_config.eos_token_id if model.generation_config else None
    given = [tokenizer.eos_token_id, *(config if isinstance(config, list) else [config]), model.config.eos_token_id]
    end_tokens = list(dict.fromkeys(token for token in given if isinstance(token, int)))
    if not end_tokens:
        raise ModelError("the tokenizer has no end token; give it one and save it")
    return end_tokens


def _predictable(tokens: list[int], vocabulary: int) -> list[int]:
    """Returns the end tokens that are in the model's vocabulary; it could never end an answer with another one."""
    if kept := [token for token in tokens if 0 <= token < vocabulary]:
        return kept
    raise ModelError(
        f"the end tokens {tokens} are not in the model's vocabulary of {vocabulary}; check its config.json"
    )


def _begins_inside_token(target: str, prompt: str) -> InputError:
    return InputError(
        f"the target {target!r} begins in the middle of a token, because the prompt ends with {prompt[-20:]!r}; "
        "end the template or the input with a whole word, a colon or a line break"
    )
