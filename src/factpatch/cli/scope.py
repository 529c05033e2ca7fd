"""The command `factpatch scope train`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, at_least

app = typer.Typer(help="Train a scope, which decides which of many facts an input is about.", no_args_is_help=True)


@app.command()
def train(
    model: Model,
    data: Annotated[Path, typer.Option(help="Revision file with paraphrases, as written by factpatch revise.")],
    output: Annotated[Path, typer.Option(help="The scope file to write (.safetensors).")],
    facts: Annotated[int, at_least(10, "Maximum number of facts to train on.")] = 20_000,
    steps: Annotated[int, at_least(1, "Training steps.")] = 1500,
    false_matches: Annotated[
        float, typer.Option(help="Maximum share of unrelated inputs that may match one of 1,024 active facts.")
    ] = 0.005,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a scope for a model on the paraphrases in a revision file.

    Example: factpatch scope train --model runs/qa --data qa-train.jsonl --output qa-scope.safetensors
    """
    start = time.perf_counter()
    from factpatch.data.revisions import read_revisions
    from factpatch.models import load_model
    from factpatch.scope import Scope, ScopeConfig

    common.prepare(seed)
    config = ScopeConfig(facts=facts, steps=steps, false_matches=false_matches, seed=seed)
    common.refuse_existing_file(output, "--output")
    revisions = list(read_revisions(data))
    loaded = load_model(model, device, template=template)
    with common.status_bar("training the scope") as update:
        scope = Scope.train(loaded, revisions, config, lambda stage, share: update(share, stage))
    scope.save(output)
    kept = scope.matcher.comparer is not None
    result = {**asdict(scope.calibrated), "comparer": kept, "seconds": time.perf_counter() - start}
    common.print_result(result, output, as_json)
