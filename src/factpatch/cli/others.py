"""Inputs besides the edited ones: those whose answers should not change, and those that answers are compared on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from factpatch import world
from factpatch.cli.common import at_least
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.jsonl import read_jsonl, required_text, text_list

MAX_OTHERS = 500  # inputs that answers are compared on; merging uses more
Wordings = Mapping[str, Sequence[str]]  # paraphrases by the input's normalised text

Others = Annotated[
    Path | None,
    typer.Option(
        help='Inputs whose answers should not change: one {"input": ...} per line, such as a revision file, or "world" '
        "for the questions of the embedded world, the default for --model world."
    ),
]
MaxOthers = Annotated[int, at_least(1, "Maximum number of inputs to use from --others, evenly spaced.")]
ComparedInputs = Annotated[
    Path | None,
    typer.Option(
        help='Inputs to measure the patch on: a revision file, or one {"input": ...} per line. Paraphrases of the '
        "patch's own inputs count for equivalence, all other inputs for retain. Default for --model world: the world's "
        "revisions."
    ),
]


def read_others(path: Path | None, model: str | None, most: int) -> list[str]:
    """Reads at most `most` inputs, evenly spaced, from a file or from the embedded world.

    The embedded world's inputs are used if the path is "world", or if there is no path and the model is "world".
    """
    if str(path or model) == "world":
        return evenly_spaced([fact.questions[0] for fact in world.facts()], most)
    if path is None:
        raise InputError("--others is missing; give a file of inputs to leave unchanged, such as a revision file")
    _, texts = read_wordings(path, None)
    if not texts:
        raise InputError(f"{path} has no inputs; give a file of inputs whose answers should not change")
    return evenly_spaced(texts, most)


def read_wordings(path: Path | None, model: str | None) -> tuple[Wordings, list[str]]:
    """Reads the paraphrases and the inputs of a file; by default, those of the embedded world or none."""
    if path is None and model != "world":
        return {}, []

    def parse(record: dict[str, Any]) -> tuple[str, list[str]] | None:
        if "provenance" in record:
            return None
        keys = [key for key in ("rephrases", "human_rephrases") if key in record]
        return required_text(record, "input"), [text for key in keys for text in text_list(record, key)]

    records = [record for record in read_jsonl(path or world.REVISIONS, parse) if record is not None]
    return {normalize(text): paraphrases for text, paraphrases in records}, [text for text, _ in records]


def evenly_spaced(texts: Sequence[str], most: int) -> list[str]:
    """Returns at most `most` of the texts, evenly spaced."""
    return list(texts[:: max(1, -(-len(texts) // most))])
