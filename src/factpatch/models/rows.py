"""Batches of tokenised texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from factpatch.device import to_device

NO_TARGET = -100  # label that cross_entropy ignores
POSITIONS_PER_BATCH = 8192  # target positions whose scores over a whole vocabulary are in memory together

Encoded = dict[str, list[int]]  # one text: token ids, attention mask and whatever else the model's forward needs
Items = TypeVar("Items", bound=Sequence[Any])


@dataclass(frozen=True)
class Rows:
    """A padded batch on the model's device."""

    inputs: dict[str, Tensor]  # arguments of the model's forward, each (rows, tokens)
    labels: Tensor | None = None  # (rows,) class ids, or (rows, tokens) with NO_TARGET where there is no target
    # The target positions that count, as indices into rows·tokens (for classifiers: rows). None means all.
    target_positions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    def at_targets(self, ignored: Sequence[int] = ()) -> Rows:
        """Returns the batch with `target_positions` set: all positions with a target, except for ignored labels."""
        assert self.labels is not None
        excluded = torch.tensor([NO_TARGET, *ignored], device=self.labels.device)
        return replace(self, target_positions=torch.isin(self.labels.flatten(), excluded, invert=True).nonzero()[:, 0])

    def part(self, chosen: slice) -> Rows:
        """Returns some of the rows, with all of their labels."""
        inputs = {name: tensor[chosen] for name, tensor in self.inputs.items()}
        return Rows(inputs, None if self.labels is None else self.labels[chosen])

    @property
    def row_of_position(self) -> Tensor:
        """The row that each target position belongs to: (positions,)."""
        assert self.labels is not None
        assert self.target_positions is not None
        return self.target_positions // self.labels.shape[1:].numel()  # a classifier's label is one token

    @property
    def target_labels(self) -> Tensor:
        """The label at each target position: (positions,)."""
        assert self.labels is not None
        return selected(self.labels.flatten(), self)

    def sums(self, values: Tensor) -> Tensor:
        """Sums values at the target positions, (positions,), over each row: (rows,)."""
        return values.new_zeros(len(self)).index_add(0, self.row_of_position, values)

    def means(self, values: Tensor) -> Tensor:
        """Averages values at the target positions, (positions,), over each row: (rows,). Rows without any get 0."""
        return self.sums(values) / torch.bincount(self.row_of_position, minlength=len(self)).clamp(min=1)


def in_batches(items: Items, size: int) -> Iterator[Items]:
    """Yields slices of `size` consecutive items; the last one may be shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]  # pyright: ignore[reportReturnType] (a slice of a list is a list)


def padded(texts: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Pads texts, given as token ids, on the right and returns them as one tensor: (texts, tokens)."""
    filled = np.full((len(texts), max(map(len, texts), default=0)), fill, dtype=np.int64)
    for row, ids in zip(filled, texts, strict=True):
        row[: len(ids)] = ids
    return to_device(device, filled)


def selected(flat: Tensor, rows: Rows) -> Tensor:
    """Selects the target positions from a tensor over all positions: (positions, ...)."""
    return flat if rows.target_positions is None else flat.index_select(0, rows.target_positions)
