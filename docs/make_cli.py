"""Writes docs/cli.md from the program itself: `make docs`. A test keeps the page up to date."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer

from factpatch.cli import app

PAGE = Path(__file__).parent / "cli.md"


def commands(command: Any, path: str) -> list[tuple[str, Any]]:
    """Every command with its full name, groups left out."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name, sub in inner.items() for found in commands(sub, f"{path} {name}")]


def section(name: str, command: Any) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        is_argument = parameter.param_type_name == "argument"
        shown = str(parameter.name).upper() if is_argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
        unset = parameter.default is None or parameter.default is False or callable(parameter.default)
        default = "required" if parameter.required else "" if unset else f"`{parameter.default}`"
        rows.append(f"| `{shown}` | {default} | {getattr(parameter, 'help', None) or ''} |")
    text = inspect.cleandoc(command.help or "")
    about, _, example = text.partition("Example: ")
    return f"## {name}\n\n{about.strip()}\n\n```\n{example.strip()}\n```\n\n" + "\n".join(rows) + "\n"


def page() -> str:
    intro = (
        "# Command line\n\nResults go to stdout, progress and messages to stderr. Exit 0, 1 for an error that the message "
        "explains, 2 for wrong usage.\nThis page is made from the program by `make docs`.\n"
    )
    return "\n".join([intro, *(section(name, c) for name, c in commands(typer.main.get_command(app), "factpatch"))])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
