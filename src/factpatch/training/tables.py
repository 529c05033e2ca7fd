"""Tables from which a training batch is put together: texts, lists of numbers, and the sizes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from factpatch.device import to_device
from factpatch.models.rows import Encoded, padded
from factpatch.training.sampler import Indices


class Sizes:
    """The sizes of a batch's tensors, by name.

    With `few`, they are rounded up and never shrink, so that they soon stop changing: each set of sizes is recorded as
    a CUDA graph of its own.
    """

    def __init__(self, few: bool):
        self.few = few
        self.largest: dict[str, int] = {}

    def fitting(self, name: str, needed: Indices, step: int) -> int:
        """Returns a size that is enough for each of the needed ones, rounded up to a multiple of `step` with `few`."""
        size = int(needed.max(initial=1))
        if not self.few:
            return size
        self.largest[name] = max(size + -size % step, self.largest.get(name, 0))
        return self.largest[name]


class TextNumbers:
    """Numbers texts in the order in which they are first looked up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def known(self) -> list[str]:
        return list(self.numbers)


class TextTable:
    """Encoded texts, padded, on a device."""

    def __init__(self, encoded: Sequence[Encoded], pad: int, device: torch.device):
        self.lengths = np.array([len(one["input_ids"]) for one in encoded])
        fills = {"input_ids": pad}
        self.columns = {key: padded([one[key] for one in encoded], fills.get(key, 0), device) for key in encoded[0]}

    def pick(self, indices: Indices, width: int) -> dict[str, Tensor]:
        """Returns a batch of the chosen texts: (texts, width) each, or less if no text of the table is so long."""
        index = to_device(self.columns["input_ids"].device, indices)
        return {key: column[index, :width] for key, column in self.columns.items()}


class Ragged:
    """Lists of numbers of different lengths, stored end to end."""

    def __init__(self, lists: Iterable[list[int]]):
        stored = list(lists)
        self.counts = np.array([len(one) for one in stored], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.flat = np.array([number for one in stored for number in one] or [0], dtype=np.int64)

    def at(self, lists: Indices, indices: Indices) -> Indices:
        """Returns one entry of each chosen list (arbitrary for an empty list)."""
        return self.flat[np.minimum(self.starts[lists] + indices, len(self.flat) - 1)]
