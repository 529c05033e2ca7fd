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
from factpatch.models.rows import NO_TARGET, Encoded, Rows, padded
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
        read, there = rows.labels[:, :-1], rows.labels[:, 1:] != NO_TARGET
        ids = torch.cat([prompts["input_ids"], read.masked_fill(~there, self.tokenizer.pad_token_id or 0)], 1)
        mask = torch.cat([prompts["attention_mask"], there.long()], 1)  # (rows, prompt + target tokens - 1)
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

    def decide(self, rows: Rows, count: int = 1, edits: int | None = None) -> list[list[str]]:
        inputs = self._aligned(rows.inputs)
        stops = self._stops.to(self.device)
        first, fill = stops.first, self.tokenizer.pad_token_id or 0
        steps = PromptSteps(self._next_logits, inputs)
        ids = greedy_search(steps, self.max_answer_tokens, stops, first, fill, edits)
        ranked = [[text] for text in self._decoded(ids.tolist())]
        if count == 1:
            return ranked
        generation = GenerationConfig(
            num_beams=self.beams,
            max_new_tokens=self.max_answer_tokens,
            length_penalty=0.0,  # the most likely answers, without a bonus for their length
            eos_token_id=self.end_tokens[0],
            pad_token_id=fill,
            begin_suppress_tokens=first.tolist(),
        )
        found = beam_search(PromptSteps(self._next_logits, inputs), generation, edits, stops).sequences
        texts = self._decoded(found[:, :, 1:].flatten(0, 1).tolist())
        for row, best in enumerate(ranked):
            others = dict.fromkeys(texts[row * self.beams : (row + 1) * self.beams])
            best += [text for text in others if text and text not in best][: count - 1]
        return ranked

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
    known = [tokenizer.eos_token_id, *(config if isinstance(config, list) else [config]), model.config.eos_token_id]
    found = list(dict.fromkeys(token for token in known if isinstance(token, int)))
    if not found:
        raise ModelError("the tokenizer has no end token; give it one and save it")
    return found


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
