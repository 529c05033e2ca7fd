"""factpatch evaluate"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from factpatch.cli.common import (
    Device,
    Json,
    Model,
    Precision,
    Seed,
    SkipBad,
    prepare,
    print_json,
    progress_bar,
    show_counts,
    working,
)
from factpatch.errors import InputError
from factpatch.files import atomic_file, check_writable


def evaluate(
    model: Model,
    data: Annotated[str, typer.Option(help="Revisions to edit, as revise writes them.")],
    output: Annotated[Path, typer.Option(help="The folder for summary.json and edits.jsonl.")],
    method: Annotated[str, typer.Option(help="hyper: a trained editor.")] = "hyper",
    editor: Annotated[str | None, typer.Option(help="The folder of an editor trained for this model.")] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="Edits, sampled; all, if left out.")] = None,
    retain: Annotated[int | None, typer.Option(min=1, help="Other inputs, sampled; all, if left out.")] = None,
    loop: Annotated[int, typer.Option(min=1, help="Update until it takes, at most N times; 5 if N is left out.")] = 1,
    precision: Precision = None,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure an edit method: success, what stays, paraphrases, and accuracy lost.

    Example: factpatch evaluate --model runs/qa --editor runs/qa-editor/editor --data dev.jsonl --output runs/qa-dev
    """
    if method != "hyper":
        raise InputError(f"expected the method hyper, found {method!r}")
    if editor is None:
        raise typer.BadParameter("the method hyper needs --editor")
    start = time.perf_counter()
    with working("loading"):
        from factpatch.device import find_dtype
        from factpatch.editors import Looped, load_editor
        from factpatch.evaluation import editable, measure
        from factpatch.facts import read_revisions
        from factpatch.metrics import summary
        from factpatch.models import load_model

        check_writable(output)
        prepare(seed)
        bad: list[str] = []
        revisions = list(read_revisions(data, bad.append if skip_bad else None))
        task_model = load_model(model, device).cast(find_dtype(precision, device))
        chosen = Looped(load_editor(editor, task_model.device), loop)
    chance = random.Random(seed)
    others = revisions if retain is None else chance.sample(revisions, min(retain, len(revisions)))
    candidates = editable(task_model, revisions)
    sample = candidates if edits is None else chance.sample(candidates, min(edits, len(candidates)))
    if not sample:
        raise InputError(f"{data}: expected revisions with alternatives, found none; make them with factpatch revise")
    with progress_bar("editing", len(sample)) as bar:
        outcomes = measure(chosen, task_model, sample, others, lambda n: bar.advance(bar.task_ids[0], n))
    result: dict[str, Any] = {
        **summary(outcomes),
        "edits": len(sample),
        "retain_inputs": len(others),
        "bad": len(bad),
        "seconds": time.perf_counter() - start,
    }
    with atomic_file(output / "edits.jsonl") as scratch:
        lines = [{"id": r.id, "input": r.input, **asdict(o)} for r, o in zip(sample, outcomes, strict=True)]
        scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    with atomic_file(output / "summary.json") as scratch:
        about = {"model": model, "method": method, "editor": editor, "data": data, "loop": loop, "seed": seed}
        scratch.write_text(json.dumps({**about, "result": result}, indent=2) + "\n")
    print_json(result) if as_json else show_counts(result, output)
