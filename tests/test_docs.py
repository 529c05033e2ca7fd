"""The documentation agrees with the program."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from factpatch.cli import app

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted([*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")])
LONGEST_LINE = 120


@pytest.fixture(scope="module")
def make_cli() -> Any:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_up_to_date(make_cli: Any) -> None:
    assert (DOCS / "cli.md").read_text() == make_cli.page(), "run `make docs`"


def test_every_command_has_the_common_options_and_an_example(make_cli: Any) -> None:
    for name, command in make_cli.commands(typer.main.get_command(app), "factpatch"):
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--json", "--device", "--seed"} <= options, name
        assert f"Example: {name}" in command.help, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_lists_every_page() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(docs/([^)]+)\)", (DOCS.parent / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_wrapped(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    assert not [f"{page.name}:{number}" for number, line in lines if len(line) > LONGEST_LINE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Parses the names and options of commands in code blocks, without running them."""
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program: Any = typer.main.get_command(app)
    for line in re.findall(r"^factpatch .+", "".join(blocks).replace("\\\n", " "), re.MULTILINE):
        words, command = shlex.split(line, comments=True)[1:], program
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
