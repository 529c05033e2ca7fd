"""factpatch paraphrase"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli.common import (
    Data,
    Device,
    Json,
    Precision,
    Seed,
    SkipBad,
    prepare,
    print_json,
    progress_bar,
    show_counts,
    working,
)


def paraphrase(
    data: Data,
    output: Annotated[Path, typer.Option(help="The same records with their paraphrases, to write.")],
    forward: Annotated[str, typer.Option(help="A translation model out of the data's language: folder or hub name.")],
    backward: Annotated[str, typer.Option(help="The one that translates back.")],
    precision: Precision = None,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make paraphrases by translating there and back with 5 × 5 beams. Needs the `translate` extra for MarianMT models.

    They replace the `rephrases` that the data already has; `human_rephrases` stay. Run it again after a kill and it
    goes on where it stopped.

    Example: factpatch paraphrase --data facts.jsonl --output out.jsonl --forward opus-mt-en-de --backward opus-mt-de-en
    """
    start = time.perf_counter()
    with working("loading"):
        from factpatch.data.paraphrase import RoundTrip
        from factpatch.data.paraphrase import paraphrase as write_paraphrases
        from factpatch.data.records import count_records, refuse_overwriting
        from factpatch.device import find_dtype
        from factpatch.models import load_model

        prepare(seed)
        refuse_overwriting(output, data)
        total = count_records(data, skip_bad)
        dtype = find_dtype(precision, device)
        round_trip = RoundTrip(load_model(forward, device, dtype), load_model(backward, device, dtype))
    with progress_bar("translating", total) as advance:
        result = write_paraphrases(round_trip, data, output, skip_bad, advance)
    result["seconds"] = time.perf_counter() - start
    print_json(result) if as_json else show_counts(result, output)
