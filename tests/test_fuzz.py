"""Fuzzing: whatever a file contains, its reader returns or raises one of our own errors.

`make fuzz` tries 100,000 files; a usual test run only a few hundred.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import loud_editor

from factpatch.data.records import read_records
from factpatch.data.revisions import read_revisions
from factpatch.editors import load_editor
from factpatch.errors import FactpatchError
from factpatch.evaluation.summary import Summary
from factpatch.facts import FactEdit, read_edits
from factpatch.patch import Patch
from factpatch.training.config import resolve_config

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
READERS = 7
EXAMPLES = int(os.environ.get("FACTPATCH_FUZZ", "350")) // READERS
fuzzed = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)

KEYS = """id input target prediction output answer meta alternatives rephrases human_rephrases answers neighbours
subject provenance model data settings requested_rewrite prompt target_new target_true str case_id template_questions
version task method result intervals success edits curve kind base editor weights checksum width""".split()
TEXTS = st.text(max_size=8) | st.sampled_from(["", "a", "\ud800", "\x00", "NOT ENOUGH INFO", "hyper", "classify"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=6),
    max_leaves=12,
)
LINES = st.lists(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20), max_size=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patch and an editor, which are damaged in many ways."""
    folder = tmp_path_factory.mktemp("fuzz")
    model = tiny.build("bert")
    loud_editor(model).save(folder / "editor")
    edit = FactEdit("x", "a", "y")
    loud_editor(model).propose(model, [FactEdit("what is paris", "LABEL_0", "LABEL_1")])[0].save(folder / "whole")
    Patch({}, model.fingerprint, "stub", (edit,)).save(folder / "small")
    return folder


def tried(read: Callable[[Path], Any], content: bytes, suffix: str = ".jsonl") -> None:
    """Reads a file with this content. Any error that is not ours fails the test."""
    with tempfile.TemporaryDirectory() as folder, suppress(FactpatchError):
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(content)
        read(path)


@pytest.mark.parametrize(
    "read",
    [read_edits, lambda path: list(read_records(path)), lambda path: list(read_revisions(path))],
    ids=["edits", "records", "revisions"],
)
@fuzzed
@hypothesis.given(lines=LINES, packed=st.booleans())
def test_lines(read: Callable[[Path], Any], lines: list[bytes], packed: bool) -> None:
    content = b"\n".join(lines)
    tried(read, gzip.compress(content) if packed else content, ".jsonl.gz" if packed else ".jsonl")


@fuzzed
@hypothesis.given(data=st.data())
def test_patches(place: Path, data: Any) -> None:
    content = bytearray((place / data.draw(st.sampled_from(["whole", "small"]))).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 4000)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    tried(Patch.load, bytes(content))


@fuzzed
@hypothesis.given(changes=st.dictionaries(st.sampled_from(["kind", "base", "editor", "weights", "checksum"]), VALUES))
def test_editors(place: Path, changes: dict[str, Any]) -> None:
    whole = (place / "editor" / "config.json").read_text()
    try:
        (place / "editor" / "config.json").write_text(json.dumps({**json.loads(whole), "checksum": None, **changes}))
        with suppress(FactpatchError):
            load_editor(place / "editor", torch.device("cpu"))
    finally:
        (place / "editor" / "config.json").write_text(whole)


@fuzzed
@hypothesis.given(values=VALUES, whole=st.booleans())
def test_results(values: Any, whole: bool) -> None:
    known = {"version": 1, "task": "classify", "method": "hyper", "result": values} if whole else values
    with tempfile.TemporaryDirectory() as folder, suppress(FactpatchError):
        (Path(folder) / "summary.json").write_text(json.dumps(known))
        Summary.read(Path(folder))


@fuzzed
@hypothesis.given(lines=st.lists(st.sampled_from(["steps", "lr", "editor.width", "x"]), max_size=4), value=VALUES)
def test_configs(lines: list[str], value: Any) -> None:
    text = "\n".join(f"{key} = {json.dumps(value)}" for key in lines).encode(errors="surrogatepass")
    tried(lambda path: resolve_config(None, path, [f"{key}={value}" for key in lines], {}), text, ".toml")
