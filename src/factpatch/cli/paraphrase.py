"""The command `factpatch paraphrase`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli import common
from factpatch.cli.common import Data, Device, Json, Precision, Seed, SkipBad


def paraphrase(
    data: Data,
    output: Annotated[Path, typer.Option(help="The file to write: the same records with paraphrases.")],
    forward: Annotated[str, typer.Option(help="Model that translates into another language: folder or hub name.")],
    backward: Annotated[str, typer.Option(help="Model that translates back: folder or hub name.")],
    precision: Precision = None,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Paraphrase inputs by translating them into another language and back.

    Five beams each way give up to 25 paraphrases per input. They replace the
    `rephrases` in the data; `human_rephrases` stay.
    MarianMT models need the `translate` extra.
    If the command is interrupted, rerun it to resume.

    In the counts, `bad` are records that were skipped by --skip-bad and
    `left_out` are claims labelled NOT ENOUGH INFO.

    Example: factpatch paraphrase --data facts.jsonl --output out.jsonl --forward opus-mt-en-de --backward opus-mt-de-en
    """
    start = time.perf_counter()
    with common.working("loading"):
        from factpatch.data.paraphrase import RoundTrip
        from factpatch.data.paraphrase import paraphrase as write_paraphrases
        from factpatch.data.records import count_records, refuse_overwriting
        from factpatch.device import find_dtype
        from factpatch.models import load_model

        common.prepare(seed)
        refuse_overwriting(output, data)
        total = count_records(data, skip_bad)
        dtype = find_dtype(precision, device)
        round_trip = RoundTrip(load_model(forward, device, dtype), load_model(backward, device, dtype))
    with common.progress_bar("translating", total) as advance:
        result = write_paraphrases(round_trip, data, output, skip_bad, advance)
    result["seconds"] = time.perf_counter() - start
    common.print_result(result, output, as_json)
