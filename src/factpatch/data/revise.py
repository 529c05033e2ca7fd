"""From records to revisions ⟨x, y, a, Pˣ⟩: what the model says, what else it could say, paraphrases it agrees on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from factpatch.data.chunked import write_in_chunks
from factpatch.data.records import Record
from factpatch.data.revisions import Revision, read_revisions
from factpatch.facts import normalize, same
from factpatch.models import Classifier, TaskModel
from factpatch.models.base import Encoded

CHUNK = {"cpu": 256, "cuda": 4096}  # records that are predicted together and written together


def revise(
    model: TaskModel,
    source: str | Path,
    output: str | Path,
    skip_bad: bool = False,
    on_done: Callable[[int], object] = lambda records: None,
) -> dict[str, Any]:
    """Writes the revision file of a data file, and says what is in it. A killed run is taken up where it stopped."""

    labels = model.labels if isinstance(model, Classifier) else ()

    def check(record: Record) -> None:
        model.check_input(record.input)
        wanted = [record.alternative] if record.alternative else []
        for target in (*wanted, *record.answers) if labels else wanted:
            model.check_target(target)

    counts = write_in_chunks(
        source,
        output,
        lambda chunk: (chunk, encode_records(model, chunk)),
        lambda read: [revision.to_json() for revision in revise_records(model, *read)],
        settings={"model": model.identity, "dtype": str(model.model.dtype)},
        size=CHUNK[model.device.type],
        check=check,
        skip_bad=skip_bad,
        on_done=on_done,
        labels=labels,
    )
    return {**_summary(output), "records": counts.read, "left_out": counts.left_out, "bad": counts.bad}


def encode_records(model: TaskModel, records: Sequence[Record]) -> dict[str, Encoded]:
    """All their texts that the model can read."""
    return model.encode_readable([text for r in records for text in (r.input, *r.rephrases, *r.human_rephrases)])


def revise_records(
    model: TaskModel, records: Sequence[Record], encoded: dict[str, Encoded] | None = None
) -> list[Revision]:
    """All in a few batches: every input with its alternatives, every paraphrase with its prediction."""
    encoded = encode_records(model, records) if encoded is None else encoded
    for record in records:
        if record.input not in encoded:
            model.check_input(record.input)
    ranked = model.candidates_encoded([encoded[record.input] for record in records])
    rephrases = dict.fromkeys(text for r in records for text in (*r.rephrases, *r.human_rephrases) if text in encoded)
    best = model.candidates_encoded([encoded[text] for text in rephrases], count=1)
    said = {text: outputs[0] for text, outputs in zip(rephrases, best, strict=True)}

    def agreeing(record: Record, rephrases: Sequence[str], prediction: str) -> tuple[str, ...]:
        """Those that the model answers alike; none that is the input, or another of them, after normalising."""
        kept = {normalize(record.input): ""}
        for text in rephrases:
            if text in said and same(said[text], prediction):
                kept.setdefault(normalize(text), text)
        return tuple(kept.values())[1:]

    return [
        Revision(
            id=record.id,
            input=record.input,
            prediction=(prediction := outputs[0]),
            alternatives=alternatives(model, record, outputs),
            rephrases=agreeing(record, record.rephrases, prediction),
            human_rephrases=agreeing(record, record.human_rephrases, prediction),
            answers=record.answers,
        )
        for record, outputs in zip(records, ranked, strict=True)
    ]


def alternatives(model: TaskModel, record: Record, outputs: Sequence[str]) -> tuple[str, ...]:
    """What the data asks for, then the other labels, or the other beams that differ from the prediction."""
    others = model.labels if isinstance(model, Classifier) else outputs
    wanted = [record.alternative] if record.alternative else []
    kept = {normalize(outputs[0]): ""}
    for text in (*wanted, *outputs[1:], *others):
        if text.strip():
            kept.setdefault(normalize(text), text)
    return tuple(kept.values())[1:]


def _summary(output: str | Path) -> dict[str, Any]:
    kept = with_alternative = with_paraphrase = with_human = 0
    for revision in read_revisions(output):
        kept += 1
        with_alternative += bool(revision.alternatives)
        with_paraphrase += bool(revision.rephrases or revision.human_rephrases)
        with_human += bool(revision.human_rephrases)
    shares = {
        "with_alternative": with_alternative,
        "with_paraphrase": with_paraphrase,
        "with_human_paraphrase": with_human,
    }
    return {"kept": kept, **{key: number / kept for key, number in shares.items()}}
