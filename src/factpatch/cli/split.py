"""The command `factpatch split`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Seed, SkipBad

REPORT_EVERY = 1000  # records between two updates of the progress bar


def split(
    data: Annotated[list[str], typer.Argument(metavar="FILE", help="Data files to split together.")],
    train: Annotated[Path, typer.Option(help="The training file to write.")],
    dev: Annotated[Path, typer.Option(help="The dev file to write.")],
    share: Annotated[float, typer.Option(help="Share of each relation's facts for the dev file.")] = 0.1,
    skip_bad: SkipBad = False,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Split facts into a training file and a dev file.

    All questions of a fact go to the same file, and the dev file gets the
    same share of the facts of every relation, as in the split of zsRE by
    De Cao et al. (2021).

    In the counts, `bad` are records that were skipped by --skip-bad and
    `left_out` are claims labelled NOT ENOUGH INFO.

    Example: factpatch split zsre-train.jsonl zsre-dev.jsonl --train train.jsonl --dev dev.jsonl
    """
    start = time.perf_counter()
    from factpatch.data.formats import Record
    from factpatch.data.records import Counts, read_records, refuse_overwriting
    from factpatch.data.split import split_facts, write_split
    from factpatch.device import find_device

    find_device(device)
    for file, option in ((train, "--train"), (dev, "--dev")):
        refuse_overwriting(file, *data)
        common.refuse_existing_file(file, option)
    counts = Counts()
    with common.progress_bar("splitting", None) as advance:

        def records() -> Iterator[Record]:
            for source in data:
                for record in read_records(source, counts, skip_bad=skip_bad):
                    yield record
                    if counts.kept % REPORT_EVERY == 0:
                        advance(REPORT_EVERY)

        parts = split_facts(records(), share, seed)
        write_split(parts, train, dev)
    result = {"records": counts.read, "left_out": counts.left_out, "bad": counts.bad, **parts.counts()}
    result["seconds"] = time.perf_counter() - start
    common.print_result(result, f"{train} and {dev}", as_json)
