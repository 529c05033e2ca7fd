"""The documentation agrees with the program, its links work and its lines are wrapped."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from factpatch.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINE = 120  # characters
LINK = re.compile(r"[-*\s]*!?\[.*\]\(\S+\)[.,;]?")  # a line that is one link or image cannot be wrapped


def test_the_command_line_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    assert spec is not None
    assert spec.loader is not None
    make_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cli)
    assert (DOCS / "cli.md").read_text() == make_cli.page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_are_wrapped(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    long = [n for n, line in lines if len(line) > LINE and not line.startswith("|") and not LINK.fullmatch(line)]
    assert not long, f"{page.name}: lines over {LINE} characters: {long}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """The command line accepts the names and options of all commands in the documentation; they are not run."""
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = "".join(blocks).replace("\\\n", " ")  # one command may go over several lines
    for line in re.findall(r"^factpatch .+", commands, re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
