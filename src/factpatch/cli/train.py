"""factpatch train"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from factpatch.cli.common import (
    Device,
    Json,
    Model,
    SkipBad,
    announce,
    is_main_process,
    prepare,
    print_json,
    show_counts,
    stderr,
    warn,
)

if TYPE_CHECKING:
    from factpatch.training.train import Status


def train(
    model: Model,
    train: Annotated[str, typer.Option(help="Revisions to learn from, as revise writes them.")],
    output: Annotated[Path, typer.Option(help="The folder for the run: editor, last, config.json, metrics.jsonl.")],
    valid: Annotated[
        str | None, typer.Option(help="Revisions that choose the best editor. A slice of train, if left out.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="A TOML file, or fc, qa, paper-fc, paper-qa. The quick one for the model's task, if left out."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, over the config's; may be given several times.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the editor.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train this long, with the schedule scaled to it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")] = None,
    as_json: Json = False,
) -> None:
    """Train an editor for a model: edits that take, for paraphrases too, and change nothing else.

    Example: factpatch train --model runs/fever --train fever-train.jsonl --output runs/fever-editor --minutes 10
    """
    from factpatch.device import find_device
    from factpatch.models import Classifier, load_model
    from factpatch.processes import join_processes
    from factpatch.training import PRESETS, Train, resolve_config

    if steps and minutes:
        raise typer.BadParameter("give --steps or --minutes, not both", param_hint="--minutes")
    prepare(seed or 0)
    announce(f"loading {model}")
    join_processes(find_device(device))  # each of which then has a GPU of its own
    task_model = load_model(model, device)
    quick = "fc" if isinstance(task_model, Classifier) else "qa"
    preset, path = (config, None) if config in PRESETS else (quick, config)
    overrides = {"steps": steps, "minutes": minutes, "seed": seed}
    resolved = resolve_config(preset, path, setting or [], overrides)
    run = Train(resolved, task_model, output, resume)
    announce(f"reading {train}")
    with _LiveTable() as table:
        result = run.run(train, valid, skip_bad, table.show, warn, table.prepare)
    if not is_main_process():
        return
    print_json(result) if as_json else show_counts(result, output)


class _LiveTable(Live):
    """The run's figures, as they are now; in a log, a line for each validation."""

    def __init__(self) -> None:
        super().__init__(console=stderr, transient=True, auto_refresh=False)
        self.visible = is_main_process() and stderr.is_terminal
        self.logged = 0  # the last validation's step

    def prepare(self, share: float) -> None:
        if self.visible:
            self.update(f"asking the unedited model, {share:.0%}", refresh=True)

    def show(self, status: Status) -> None:
        if self.visible:
            self.update(_table(status), refresh=True)
        elif (step := status.validation.get("step", 0)) > self.logged and not stderr.is_terminal:
            self.logged = step
            warn(f"step {step:,}, {status.share:.0%}: " + "; ".join(" ".join(pair) for pair in _figures(status)))


def _table(status: Status) -> Table:
    table = Table(title=f"step {status.step:,}, {status.share:.0%}", show_header=False)
    for pair in _figures(status):
        table.add_row(*pair)
    return table


def _figures(status: Status) -> Iterator[tuple[str, str]]:
    yield "edit loss", f"{status.loss:.4f}"
    for name in [key for key in status.constraints if f"{key}_margin" in status.constraints]:
        value, margin, multiplier = (status.constraints[f"{name}{part}"] for part in ("", "_margin", "_multiplier"))
        yield name.upper(), f"{value:.2e}, margin {margin:.2e}, multiplier {multiplier:.2f}"
    for name in ("success", "retain", "equivalence", "equivalence_human"):
        if (share := status.validation.get(name)) is not None:
            yield name.replace("_", ", "), f"{share:.1%}"
    yield "edits/s", f"{status.edits_per_second:,.0f}"
    if status.seconds_left is not None:
        yield "time left", f"{status.seconds_left // 60:.0f} min {status.seconds_left % 60:02.0f} s"
