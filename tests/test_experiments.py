"""The experiments of the project: their commands are understood, and only final rows read dev."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from experiments import ROOT, TOOLS, experiment, result_pages

from factpatch.cli import app
from factpatch.cli.evaluate_options import check_options, parse_options
from factpatch.training import PRESETS, resolve_config

EXPERIMENTS = experiment.read_experiments(TOOLS / "experiments")
PLAN = experiment.Plan(EXPERIMENTS, Path("data"), Path("models"), Path("runs"))
COMMANDS: Any = typer.main.get_command(app)


def arguments(step: Any) -> list[str]:
    """A step's arguments, with the first of the settings that it chooses from."""
    return PLAN.command(step, next((other.values for other in PLAN.tried(step)), {}))


def parsed(step: Any) -> Any:
    words, command = arguments(step), COMMANDS
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_command_is_understood(name: str) -> None:
    for step in EXPERIMENTS[name].steps:
        options = parsed(step).params
        if step.run.startswith("train "):
            given = {"method": options["method"], "minutes": options["minutes"], "seed": options["seed"]}
            config = options["config"] or "fc"
            assert config in PRESETS
            resolve_config(config, None, list(options["setting"] or []), given)
        if step.run.startswith("evaluate "):
            checked = signature(check_options).parameters.keys() & options.keys()
            check_options(**{key: options[key] for key in checked}, updates=5 if options["loop"] else 1)
            settings = list(options["setting"] or [])
            parse_options(settings, options["method"], options["editor"], options["select"])


def all_needs(step: Any) -> set[str]:
    return {step.key}.union(*(all_needs(need) for need in PLAN.needs(step)))


def test_settings_are_chosen_and_editors_trained_without_dev() -> None:
    compared = {other.key for step in PLAN.steps.values() for other in PLAN.tried(step)}
    assert compared
    for step in PLAN.steps.values():
        if step.key in compared or step.run.startswith(("fit ", "train ", "scope ")):
            assert not [key for key in all_needs(step) if "dev" in key], step.key
            assert "/dev.jsonl" not in step.run


def test_every_row_of_a_table_is_evaluated_on_dev() -> None:
    for one in EXPERIMENTS.values():
        groups = {step.group: step for step in one.steps}
        for table in one.tables:
            for row in table["rows"]:
                assert any(key.endswith("/dev.jsonl") for key in all_needs(groups[row["step"]])), row
                assert len(row.get("paper", table.get("columns", []))) == len(table.get("columns", []))


def test_pages_are_up_to_date() -> None:
    pages = result_pages.Pages(PLAN, EXPERIMENTS.values(), ROOT / "docs" / "results" / "runs")
    shown = set()
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert pages.rewritten(text) == text, f"{path.name}: run `make results ARGS=--pages`"
        shown |= {found[3] for found in result_pages.MARKED.finditer(text) if found[2] == "table"}
    assert shown == {table["name"] for one in EXPERIMENTS.values() for table in one.tables}
