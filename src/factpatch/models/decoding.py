"""Generation one token at a time: how each kind of model continues its rows, and greedy search.

The rows of a batch may run under different edits (`engine.edited`), which need the same number of rows each. Finished
rows therefore leave the batch only together with the rows of the same index under all other edits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

Stop = Callable[[Tensor, Tensor], Tensor]  # maps previous and new tokens to whether each sequence ends


class Steps(Protocol):
    """A batch of rows that a model continues token by token, with cached keys and values."""

    rows: int
    device: torch.device

    def start(self, beams: int) -> None:
        """Prepares the rows; each is repeated `beams` times."""
        ...

    def next(self, last: Tensor) -> Tensor:
        """Appends the last tokens, (rows·beams,), and returns the logits of the next: (rows·beams, vocabulary).

        The beams of a row start equal, so the first call runs only one of them and returns (rows, vocabulary). Models
        that continue a prompt ignore the tokens of the first call.
        """
        ...

    def select(self, flat: Tensor, fewer: bool) -> None:
        """Keeps the sequences with these indices into rows·beams. `fewer` is True if some rows leave the batch."""
        ...


class EncoderDecoderSteps:
    """Steps of an encoder-decoder, which starts from its start token."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor]):
        self.model, self.inputs = model, inputs
        self.rows, self.device = len(inputs["input_ids"]), inputs["input_ids"].device

    def start(self, beams: int) -> None:
        self.beams = beams
        self.states = self.model.get_encoder()(**self.inputs).last_hidden_state  # (rows, tokens, width)
        self.mask = self.inputs["attention_mask"]
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.is_first = True

    def next(self, last: Tensor) -> Tensor:
        if not self.is_first or self.beams == 1:
            return self._logits(last)
        self.is_first = False
        logits = self._logits(last[:: self.beams])
        self.cache.batch_repeat_interleave(self.beams)
        self.states, self.mask = (x.repeat_interleave(self.beams, 0) for x in (self.states, self.mask))
        return logits

    def _logits(self, last: Tensor) -> Tensor:
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            attention_mask=self.mask,
            decoder_input_ids=last[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]

    def select(self, flat: Tensor, fewer: bool) -> None:
        self.cache.self_attention_cache.reorder_cache(flat)
        if fewer:  # beams of a row share the encoder's states, so these change only when rows leave
            self.cache.cross_attention_cache.reorder_cache(flat)
            self.states, self.mask = self.states[flat], self.mask[flat]


class PromptSteps:
    """Steps of a decoder, which continues its prompts."""

    def __init__(self, run: Callable[..., Tensor], inputs: dict[str, Tensor]):
        """`run` is the model's forward pass that returns the last position's logits. Prompts are padded on the left."""
        self.run, self.inputs = run, inputs
        self.rows, self.device = len(inputs["input_ids"]), inputs["input_ids"].device

    def start(self, beams: int) -> None:
        self.beams = beams
        self.cache = DynamicCache()
        self.mask = self.inputs["attention_mask"]
        self.position = self.mask.sum(1, keepdim=True)  # of the next token, (rows·beams, 1)
        self.is_first = True

    def next(self, last: Tensor) -> Tensor:
        if self.is_first:
            self.is_first = False
            logits = self.run(**self.inputs, past_key_values=self.cache)
            if self.beams > 1:
                self.cache.batch_repeat_interleave(self.beams)
                self.mask, self.position = (x.repeat_interleave(self.beams, 0) for x in (self.mask, self.position))
            return logits
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        inputs = {"input_ids": last[:, None], "attention_mask": self.mask, "position_ids": self.position}
        self.position = self.position + 1
        return self.run(**inputs, past_key_values=self.cache)

    def select(self, flat: Tensor, fewer: bool) -> None:
        self.cache.reorder_cache(flat)
        if fewer:  # beams of a row share its prompt, so these change only when rows leave
            self.mask, self.position = self.mask[flat], self.position[flat]


def rows_that_stay(done: Tensor, edits: int | None) -> tuple[bool, Tensor | None]:
    """Returns whether all rows are done and, if enough rows can leave the batch, the indices of those that stay.

    Removing rows copies all cached keys and values, so finished rows stay until a quarter of the batch can leave.
    Without `edits`, all rows stay to the end.
    """
    leaving = (done.view(edits or 1, -1).all(0) & (edits is not None)).repeat(edits or 1)
    all_done, enough = torch.stack([done.all(), leaving.sum() * 4 >= len(done)]).tolist()
    return bool(all_done), (~leaving).nonzero().squeeze(1) if enough and not all_done else None


@torch.no_grad()
def greedy_search(
    steps: Steps, limit: int, stop: Stop, banned_first: Tensor, fill: int, edits: int | None = None
) -> Tensor:
    """Generates the most likely token at each step, until `stop` or `limit` tokens: (rows, limit), padded with `fill`.

    The tokens in `banned_first` are not generated as a row's first token.
    """
    steps.start(1)
    tokens = torch.full((steps.rows, limit), fill, device=steps.device)
    row = torch.arange(steps.rows, device=steps.device)  # indices of the rows that are still in the batch
    last = tokens[:, 0]
    done = torch.zeros_like(row, dtype=torch.bool)
    for length in range(limit):
        logits = steps.next(last)
        if length == 0:
            logits = logits.index_fill(1, banned_first, float("-inf"))
        token = logits.argmax(-1).masked_fill(done, fill)
        tokens[row, length] = token
        done = done | stop(last, token)
        last = token
        all_done, stay = rows_that_stay(done, edits)
        if all_done:
            break
        if stay is not None:
            row, last, done = row[stay], last[stay], done[stay]
            steps.select(stay, fewer=True)
    return tokens
