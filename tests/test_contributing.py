"""CONTRIBUTING.md is true: its code blocks add a method, a metric and a data format to the running program."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny

from factpatch.data.records import FORMATS, read_records
from factpatch.editors import METHODS, create_method
from factpatch.facts import FactEdit
from factpatch.metrics import METRICS

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"`src/(?P<path>[\w/]+)\.py`(?:(?!`src/|```).)*```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.fixture(autouse=True)
def additions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each code block in the module that the text above it names, and undoes everything afterwards."""
    tables: list[dict[str, Any]] = [METHODS, METRICS, FORMATS]
    before = [dict(table) for table in tables]
    for block in BLOCK.finditer(PAGE):
        name = block["path"].replace("/", ".")
        module = import_module(name) if find_spec(name) else ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        namespace = {**vars(module)}
        exec(block["code"], namespace)
        for key, value in namespace.items():
            monkeypatch.setattr(module, key, value, raising=False)
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def test_every_code_block_says_where_it_belongs() -> None:
    assert len(BLOCK.findall(PAGE)) == PAGE.count("```python") > 0


def test_the_method_edits_and_leaves_the_model_unchanged() -> None:
    model = tiny.build("bert")
    x = "who leads france ?"
    edit = FactEdit(x, tiny.other_answer(model, x))
    before = model.fingerprint
    (patch,) = create_method("sign", lr=0.1).propose(model, [edit])
    assert model.fingerprint == before
    assert patch.method == "sign"
    rows = model.rows([x], [edit.a])
    loss = model.losses(rows).item()
    with patch.applied(model):
        assert model.losses(rows).item() < loss


def test_evaluate_and_report_know_the_method_and_the_metric(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    options = ["--model", checker, "--data", claims, "--output", tmp_path / "result", "--device", "cpu", "--json"]
    result = run("evaluate", *options, "--method", "sign", "--edits", 3, "--retain", 5).json
    assert 0 <= result["clean"] <= 1
    assert run("report", tmp_path / "result", "--output", tmp_path / "report").code == 0
    table = (tmp_path / "report" / "table.md").read_text(encoding="utf-8")
    assert "Sign step" in table
    assert "Clean" in table


def test_records_of_the_new_format_are_read_beside_the_others(tmp_path: Path) -> None:
    lines = [
        {"subject": "Burundi", "relation": "capital", "object": "Gitega"},
        {"input": "Who leads France?", "output": "Macron"},
    ]
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    triple, own = read_records(path)
    assert (triple.input, triple.answers) == ("What is the capital of Burundi?", ("Gitega",))
    assert own.answers == ("Macron",)
