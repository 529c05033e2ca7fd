"""Decides where a decoder's answer ends: at an end token or another special token, a line break or a full stop.

A full stop does not end an answer inside a number (3.5), after a single letter (J. K. Rowling) or one or two digits
(1. FC Köln), or after an abbreviation that usually precedes a name (St. Louis, Dr. Strangelove). Inside a word
(Amazon.com) it does only if it is a token of its own: generation stops there before it knows that the word continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from factpatch.models.rows import padded

ABBREVIATIONS = frozenset(
    "st ste dr mr mrs ms mx jr sr mt ft fr lt sgt cpl gen col maj capt cmdr adm rev hon prof gov sen rep pres "
    "no nos vs vol ch op ca approx".split()
)
_FULL_STOP = re.compile(r"\.(?=\s|$)")
_LAST_WORD = re.compile(r"[^\W_]+$")  # letters and digits


def cut(text: str) -> str:
    """Cuts a text after its first line or sentence."""
    line = text.strip().split("\n", 1)[0]
    for stop in _FULL_STOP.finditer(line):
        before = line[: stop.start()]
        word = _LAST_WORD.search(before)
        if before.strip() and not (word and _is_short(word[0])):
            return before.strip()
    return line.strip()


def _is_short(word: str) -> bool:
    """Returns True if a full stop after this word probably belongs to the word and does not end a sentence."""
    return len(word) == 1 or (word.isdigit() and len(word) == 2) or word.lower() in ABBREVIATIONS


class Stops:
    """Decides for each new token whether the answer ends with it, from tables over the vocabulary.

    Where a token's own text does not decide, such as for a full stop after "t", which may be the end of "St",
    generation continues, and `cut` decides once the whole text is known.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Iterable[int], vocabulary: int):
        texts = [text.strip(" ") for text in tokenizer.batch_decode([[token] for token in range(len(tokenizer))])]
        last_words = [_LAST_WORD.search(text) for text in texts]
        abbreviation_ends = {word[n:] for word in ABBREVIATIONS for n in range(len(word))}
        line_breaks = [token for token, text in enumerate(texts) if "\n" in text]
        self.end_tokens = frozenset([*end_tokens, *tokenizer.all_special_ids, *line_breaks])
        full_stops = [
            token for token, text in enumerate(texts) if text.endswith(".") and not _LAST_WORD.search(text[:-1])
        ]
        unclear = [  # tokens after which a full stop may not end the answer
            token
            for token, word in enumerate(last_words)
            if word is None or len(word[0]) == 1 or word[0].isdigit() or word[0].lower() in abbreviation_ends
        ]
        self.start = tokenizer.pad_token_id or 0  # stands for the token before the first one
        self.ends, self.full_stops, self.unclear = (
            _table(tokens, max(vocabulary, len(texts)))
            for tokens in (self.end_tokens, full_stops, [*unclear, self.start])
        )
        # Tokens that an answer may not begin with. A tokenizer can have more tokens than the model.
        self.first = torch.tensor(sorted(token for token in self.end_tokens if token < vocabulary))

    def to(self, device: torch.device) -> Stops:
        for name in ("ends", "full_stops", "unclear", "first"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def __call__(self, previous: Tensor, token: Tensor) -> Tensor:
        return self.ends[token] | self.full_stops[token] & ~self.unclear[previous]

    def shortened(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """Returns each sequence up to the token at which its generation ends."""
        tokens = padded(sequences, self.start, self.ends.device)  # (sequences, tokens)
        ends = self(F.pad(tokens[:, :-1], (1, 0), value=self.start), tokens).tolist()
        return [ids[: [*row, True].index(True) + 1] for ids, row in zip(sequences, ends, strict=True)]


def _table(tokens: Iterable[int], size: int) -> Tensor:
    table = torch.zeros(size, dtype=torch.bool)
    table[list(tokens)] = True
    return table
