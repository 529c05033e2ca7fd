"""Groups the keys of a mapping by their values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value", bound=Hashable)


def keys_by_value(mapping: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """Maps each value to the list of its keys, both in the order of the mapping."""
    groups: dict[Value, list[Key]] = {}
    for key, value in mapping.items():
        groups.setdefault(value, []).append(key)
    return groups
