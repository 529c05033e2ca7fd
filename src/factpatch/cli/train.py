"""The command `factpatch train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, SkipBad, Template

if TYPE_CHECKING:
    from factpatch.training.train import Status


def train(
    model: Model,
    train: Annotated[str, typer.Option(help="Revision file to learn from, as written by factpatch revise.")],
    output: Annotated[Path, typer.Option(help="Folder for the run: editor, last, config.json and metrics.jsonl.")],
    valid: Annotated[
        str | None,
        typer.Option(help="Revision file used to choose the best editor. Default: revisions held out of --train."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Kind of editor to train: hyper (KnowledgeEditor, the default) or mend.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="TOML file or preset: fc, qa, lm, cpu-fc, cpu-qa, cpu-lm, paper-fc, paper-qa, mend. "
            "Default: the preset for the model's task and the device. A TOML file overrides settings of that preset."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Override one setting: KEY=VALUE. May be given several times.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of training steps.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Total duration of the run, including the final measurement, instead of --steps."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help='Folder of a trained editor to start from, or "world". Default: a new editor.')
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the output folder.")] = False,
    skip_bad: SkipBad = False,
    template: Template = None,
    device: Device = None,
    seed: Annotated[
        int | None, typer.Option(callback=common.check_seed, metavar="N", help="Random seed. Default: 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train an editor whose edits succeed, generalise to paraphrases and leave other answers unchanged.

    Example: factpatch train --model runs/fever --train fever-train.jsonl --output runs/fever-editor --minutes 10
    """
    from factpatch.device import find_device
    from factpatch.models import load_model
    from factpatch.processes import join_processes
    from factpatch.training import PRESETS, Train, resolve_config
    from factpatch.training.train import ENOUGH_STEPS

    if steps and minutes:
        raise typer.BadParameter("give --steps or --minutes, not both", param_hint="--minutes")
    common.prepare(seed or 0)
    common.announce(f"loading {model}")
    join_processes(find_device(device))  # before the model is loaded: each process has a GPU of its own
    task_model = load_model(model, device, template=template)
    default = {"classifier": "fc", "seq2seq": "qa", "causal": "lm"}[task_model.kind]
    if task_model.device.type == "cpu":
        default = f"cpu-{default}"
    preset, path = (config, None) if config in PRESETS else (default, config)
    overrides = {"method": method, "steps": steps, "minutes": minutes, "seed": seed}
    run = Train(resolve_config(preset, path, setting or [], overrides), task_model, output, resume, init)
    common.announce(f"reading {train}")
    with _LiveTable() as table:
        result = run.run(train, valid, skip_bad, table.show, common.warn, table.show_stage)
    if not common.is_main_process():
        return
    if as_json:
        common.print_json(result)
    else:
        common.show_counts({key: value for key, value in result.items() if key != "trained"}, output)
    if not result["trained"]:
        best = max(record["success"] for record in run.metrics)
        why = f"it made only {result['steps']:,} steps"
        if result["steps"] >= ENOUGH_STEPS:
            why = f"at best, {best:.0%} of the validation edits succeeded"
        common.warn(
            f"This editor is not trained yet: {why}. Train it for longer, with more --minutes or --steps, or on a GPU."
        )


class _LiveTable(Live):
    """Shows the values of a run as they change. In a log, writes one line per validation."""

    def __init__(self) -> None:
        super().__init__(console=common.stderr, transient=True, auto_refresh=False)
        self.visible = common.is_main_process() and common.stderr.is_terminal
        self.logged = 0  # step of the last validation in the log
        self.stage = ""  # the last stage in the log

    def show_stage(self, stage: str, share: float) -> None:
        """Shows the progress of a stage other than training."""
        if self.visible:
            self.update(f"{stage}, {share:.0%}", refresh=True)
        elif stage != self.stage and stage != "validating" and not common.stderr.is_terminal:
            common.warn(stage)
        self.stage = stage

    def show(self, status: Status) -> None:
        if self.visible:
            self.update(_table(status), refresh=True)
        elif (step := status.validation.get("step", 0)) > self.logged and not common.stderr.is_terminal:
            self.logged = step
            common.warn(f"step {step:,}, {status.share:.0%}: " + "; ".join(" ".join(pair) for pair in _figures(status)))


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
    yield "edits per second", f"{status.edits_per_second:,.3g}"
    if status.seconds_left is not None:
        yield "time left", f"{status.seconds_left // 60:.0f} min {status.seconds_left % 60:02.0f} s"
