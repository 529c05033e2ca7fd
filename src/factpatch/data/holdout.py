"""Holds facts out of training by a hash of their ids, so that the choice does not depend on the file's order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from factpatch.errors import InputError


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Identified = TypeVar("Identified", bound=HasId)


def hash_shuffled(facts: Iterable[Identified], seed: int) -> list[Identified]:
    """Returns the facts in an order that depends only on the seed and their ids."""
    return sorted(facts, key=lambda fact: hashlib.sha256(f"{seed}/{fact.id}".encode(errors="replace")).digest())


def hold_out(facts: Sequence[Identified], size: int, seed: int) -> tuple[list[Identified], list[Identified]]:
    """Splits facts into a held-out set of `size` facts and the rest."""
    if not 0 < size < len(facts):
        raise InputError(
            f"expected at least 10 records and more than the {size} that are held out, found {len(facts)}; "
            "add records or lower --holdout"
        )
    order = hash_shuffled(facts, seed)
    return order[:size], order[size:]
