"""Random values and damaged files for the fuzz tests.

`FACTPATCH_FUZZ` is the number of files to try, shared by all readers.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from factpatch.errors import FactpatchError

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

READERS = 18
EXAMPLES = math.ceil(int(os.environ.get("FACTPATCH_FUZZ", "360")) / READERS)
ROUNDS = math.ceil(EXAMPLES / 500)  # hypothesis gets slower the longer it runs, because it remembers what it tried


def fuzzed(**given: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorates the test of one reader, which gets its share of all cases, with values drawn from `given`."""
    settings = hypothesis.settings(
        max_examples=math.ceil(EXAMPLES / ROUNDS),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def decorate(test: Callable[..., None]) -> Any:
        return pytest.mark.parametrize("part", range(ROUNDS))(settings(hypothesis.given(**given)(test)))

    return decorate


KEYS = """id input target prediction output answer meta alternatives rephrases human_rephrases answers neighbours
subject provenance model data settings requested_rewrite prompt target_new target_true str case_id template_questions
version task method result intervals success edits curve kind base editor weights checksum width step rows text before
after""".split()
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "a", "\ud800", "\x00", "NOT ENOUGH INFO", "hyper", "classify", "$x$"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2, 10**23, 2**63, 1e308, -0.0, 1e-320])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=6),
    max_leaves=12,
)
DEEP = st.sampled_from(["[" * 3000, '{"a":' * 3000])
JSON = VALUES.map(json.dumps) | DEEP | st.text(max_size=10)  # texts in the place of JSON
TYPES = [torch.float32, torch.float64, torch.float16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]
TENSORS = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.lists(st.sampled_from([0, 1, 2, 3, 32, 64]), max_size=3),
    st.sampled_from(TYPES),
    st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, math.nan, math.inf]),
)
OURS = st.sampled_from(range(1000))  # a number from which a test chooses one of its places


@contextmanager
def only_our_errors() -> Iterator[Path]:
    """Yields an empty folder. An error in the block that is not ours fails the test."""
    with tempfile.TemporaryDirectory() as folder, suppress(FactpatchError):
        yield Path(folder)


@st.composite
def damages(draw: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Draws a function that replaces, inserts, removes or cuts off some bytes of a file."""
    places = draw(
        st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=9)), min_size=1, max_size=4)
    )
    cut = draw(st.none() | st.floats(0, 1))
    most = draw(st.sampled_from([64, 4000, 10**9]))  # headers, which come first, deserve more attention

    def damage(content: bytes) -> bytes:
        found = bytearray(content)
        for place, length, new in places:
            at = int(place * min(len(found), most))
            found[at : at + length] = new
        return bytes(found if cut is None else found[: int(cut * len(found))])

    return damage


def changed(value: Any, number: int, new: Any) -> Any:
    """A copy of a JSON value with one of its parts, at any depth, replaced."""
    copy = json.loads(json.dumps(value))
    places = list(_places(copy))
    if not places:
        return new
    holder, key = places[number % len(places)]
    holder[key] = new
    return copy


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def write_changed(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], number: int, new: Any
) -> None:
    """Writes a safetensors file with one tensor or one value of the metadata replaced, or removed if `new` is None."""
    arrays, texts = dict(tensors), dict(metadata)
    parts: dict[str, Any] = arrays if isinstance(new, torch.Tensor) or (new is None and number % 2) else texts
    key = sorted(parts)[number % len(parts)]
    if new is None:
        del parts[key]
    else:
        parts[key] = new
    with suppress(UnicodeEncodeError):  # metadata that no file can have
        save_file(arrays, path, texts)
