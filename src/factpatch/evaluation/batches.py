"""Batches of texts for several edits at once. Rows are edit-major, with the same number of rows for each edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from factpatch.models import TaskModel
from factpatch.models.rows import Encoded

Entry = TypeVar("Entry")


def padded_lists(lists: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """Repeats the first entry of shorter lists, so that all have the same length."""
    length = max(map(len, lists))
    return [[*entries, *entries[:1] * (length - len(entries))] for entries in lists]


def edit_major_batches(
    model: TaskModel, encoded: Sequence[Sequence[Encoded]], parts: int
) -> Iterator[tuple[list[tuple[int, int]], list[Encoded]]]:
    """Yields batches of equally many texts for each edit, with the edit and the index of each text.

    `parts` divides batches that do not fit into memory.
    """
    columns = list(zip(*encoded, strict=True))
    lengths = [max(len(one["input_ids"]) for one in column) * len(encoded) * parts for column in columns]
    for batch in model.batches(lengths):
        places = [(edit, index) for edit in range(len(encoded)) for index in batch]
        yield places, [columns[index][edit] for edit, index in places]


def encode_lists(model: TaskModel, texts: Sequence[Sequence[str]]) -> list[list[Encoded]]:
    """Encodes the texts of each edit; texts too long for the model are truncated."""
    return [model.encode(own, model.max_input_tokens) for own in texts]
