"""Writes docs/cli.md from the help texts of the program: `make docs`. A test checks that the page is up to date."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import typer

from factpatch.cli import app

PAGE = Path(__file__).parent / "cli.md"
INTRO = """# Command line

Results go to stdout, progress and messages to stderr. The exit code is 0 on success, 1 for an error that the message
explains, and 2 for wrong usage. `make docs` generates this page from the help texts.

With `--json`, a command prints one JSON object. The table lists its main keys. Rates are between 0 and 1, and null if
there was nothing to measure.
"""
KEYS = {
    "fit": "accuracy exact_match seconds",
    "paraphrase, revise": "records kept with_alternative with_paraphrase bad seconds",
    "edit": "before after target success patch",
    "edit --facts": "success failed bad edits seconds",
    "ask": "answers patches",
    "patch apply": "patches model output facts lost",
    "patch export, ledger export --peft": "output rank kept before after",
    "evaluate, demo, train": "success retain equivalence equivalence_human deterioration edits seconds",
    "evaluate, demo": "retain_inputs",
    "train": "steps edits_per_second margin",
    "bench edit, train, evaluate": "edits_per_second limit_edits_per_second fraction_of_limit",
    "bench edit, train": "reference_edits_per_second speedup",
}


def commands(command: Any, path: str) -> list[tuple[str, Any]]:
    """All commands with their full names; a group contributes its commands."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name, sub in inner.items() for found in commands(sub, f"{path} {name}")]


def section(name: str, command: Any) -> str:
    options = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        is_argument = parameter.param_type_name == "argument"
        argument = parameter.metavar or str(parameter.name).upper()
        shown = argument if is_argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
        shown += "..." if parameter.nargs == -1 else ""
        shown += f" {parameter.metavar}" if parameter.metavar and not is_argument else ""
        unset = parameter.default is None or parameter.default is False or callable(parameter.default)
        default = " (required)" if parameter.required else "" if unset else f" (default `{parameter.default}`)"
        option = f"- `{shown}`{default}: {getattr(parameter, 'help', None) or ''}"
        options.append(textwrap.fill(option, 120, subsequent_indent="  ", break_on_hyphens=False))
    text = inspect.cleandoc(command.help or "")
    about, _, example = text.partition("Example: ")
    return f"## {name}\n\n{about.strip()}\n\n```\n{example.strip()}\n```\n\n" + "\n".join(options) + "\n"


def page() -> str:
    keys = "\n".join(f"| {names} | {' '.join(f'`{key}`' for key in found.split())} |" for names, found in KEYS.items())
    sections = [section(name, command) for name, command in commands(typer.main.get_command(app), "factpatch")]
    return "\n".join([f"{INTRO}\n| command | keys |\n|---|---|\n{keys}\n", *sections])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
