"""factpatch fit"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from factpatch.cli.common import (
    Device,
    Json,
    Model,
    Seed,
    SkipBad,
    announce,
    is_main_process,
    prepare,
    print_json,
    show_counts,
    status_bar,
)


def fit(
    model: Model,
    train: Annotated[
        str, typer.Option(help="Facts to learn: JSON lines with input and output, KILT, or hub:NAME:SPLIT.")
    ],
    output: Annotated[Path, typer.Option(help="The folder for the fine-tuned model.")],
    dev: Annotated[str | None, typer.Option(help="Facts to measure the result on, once.")] = None,
    valid: Annotated[
        str | None, typer.Option(help="Facts that choose the best weights. A slice of train, if left out.")
    ] = None,
    holdout: Annotated[
        int | None,
        typer.Option(min=1, help="Records in that slice. 1000 claims, 500 facts, a tenth at most, if left out."),
    ] = None,
    task: Annotated[
        Literal["classify", "answer"], typer.Option(help="classify: claims to labels. answer: questions to answers.")
    ] = "classify",
    labels: Annotated[
        str | None, typer.Option(help="Labels that claims may have, by commas. Those of train, if left out.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-5,
    batch: Annotated[int, typer.Option(help="Examples an update, over all processes.")] = 256,
    epochs: Annotated[float, typer.Option(help="How often to go through the data.")] = 10.0,
    steps: Annotated[int | None, typer.Option(help="Updates, instead of epochs.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train this long, instead of epochs.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout, if not the one of the model's config.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longer inputs are cut.")] = 32,
    checkpoint_seconds: Annotated[float, typer.Option(help="Write a checkpoint this often.")] = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fine-tune a model to check facts or to answer questions. The result is an ordinary Hugging Face folder.

    Example: factpatch fit --model bert-base-uncased --train train.jsonl --dev dev.jsonl --output runs/fever
    """
    from factpatch.training import Fit, FitConfig
    from factpatch.training.fit import Status

    if valid and holdout:
        raise typer.BadParameter("--holdout is a slice of train; with --valid there is none", param_hint="--holdout")
    if steps and minutes:
        raise typer.BadParameter("give --steps or --minutes, not both", param_hint="--minutes")
    prepare(seed)
    settings = FitConfig(
        task=task,
        lr=lr,
        batch=batch,
        epochs=epochs,
        steps=steps,
        minutes=minutes,
        dropout=dropout,
        max_tokens=max_tokens,
        holdout=holdout,
        labels=[label.strip() for label in labels.split(",")] if labels else None,
        checkpoint_seconds=checkpoint_seconds,
        seed=seed,
    )
    run = Fit(settings, model, output, resume, device)
    announce(f"reading {train} and loading {model}")
    with status_bar("fine-tuning") as update:

        def watch(status: Status) -> None:
            score = "" if status.score is None else f"held-out {status.score:.3f}"
            update(status.share, f"step {status.step}  loss {status.loss:.3f}  {score}")

        result = run.run(train, dev, skip_bad, watch, valid)
    if not is_main_process():
        return
    print_json(result) if as_json else show_counts(result, output)
