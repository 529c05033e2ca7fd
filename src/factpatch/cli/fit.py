"""The command `factpatch fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Precision, Seed, SkipBad, Template, at_least


def fit(
    model: Model,
    train: Annotated[
        str, typer.Option(help="Facts to learn: JSON lines with input and output, KILT, or hub:NAME:SPLIT.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the fine-tuned model.")],
    dev: Annotated[str | None, typer.Option(help="Facts to measure the final model on.")] = None,
    valid: Annotated[
        str | None, typer.Option(help="Facts used to choose the best weights. Default: facts held out of --train.")
    ] = None,
    holdout: Annotated[
        int | None,
        at_least(1, "Number of held-out facts. Default: 1000 claims or 500 questions, or a tenth if that is less."),
    ] = None,
    task: Annotated[
        Literal["classify", "answer"],
        typer.Option(
            "--task",
            metavar="TASK",
            help="classify: predict labels of claims. answer: answer questions, with an encoder-decoder or a decoder.",
        ),
    ] = "classify",
    labels: Annotated[
        str | None, typer.Option(help="Allowed labels, separated by commas. Default: the labels in --train.")
    ] = None,
    template: Template = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-5,
    batch: Annotated[
        int | None, typer.Option(help="Examples per step, over all processes. Default: 256 on a GPU, 32 on a CPU.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the training data. Default: 10 on a GPU, 3 on a CPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of training steps, instead of --epochs.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Total duration of the run, including --dev, instead of --epochs.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout rate. Default: that of the model's config.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per input; the rest is cut off.")] = 32,
    precision: Precision = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the output folder.")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fine-tune a model to check facts or to answer questions. The result is an ordinary Hugging Face folder.

    Example: factpatch fit --model bert-base-uncased --train train.jsonl --dev dev.jsonl --output runs/fever
    """
    from factpatch.device import find_device
    from factpatch.training import Fit, FitConfig
    from factpatch.training.fit import CPU_DEFAULTS, Status

    if valid and holdout:
        raise typer.BadParameter("with --valid, no facts are held out of --train", param_hint="--holdout")
    if steps and minutes:
        raise typer.BadParameter("give --steps or --minutes, not both", param_hint="--minutes")
    common.prepare(seed)
    sizes = {key: value for key, value in (("batch", batch), ("epochs", epochs)) if value is not None}
    if find_device(device).type == "cpu":
        sizes = {**CPU_DEFAULTS, **sizes}
    settings = FitConfig(
        task=task,
        lr=lr,
        steps=steps,
        minutes=minutes,
        dropout=dropout,
        max_tokens=max_tokens,
        holdout=holdout,
        template=template,
        precision=precision,
        labels=[label.strip() for label in labels.split(",")] if labels else None,
        checkpoint_seconds=checkpoint_seconds,
        seed=seed,
        **sizes,
    )
    run = Fit(settings, model, output, resume, device)
    common.announce(f"reading {train} and loading {model}")
    with common.status_bar("fine-tuning") as update:

        def watch(status: Status) -> None:
            score = "" if status.score is None else f"held-out {status.score:.3f}"
            update(status.share, f"step {status.step}  loss {status.loss:.3f}  {score}")

        result = run.run(train, dev, skip_bad, watch, valid)
    if common.is_main_process():
        common.print_result(result, output, as_json)
