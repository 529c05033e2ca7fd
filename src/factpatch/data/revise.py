"""Makes revisions ⟨x, y, a, Pˣ⟩ from records: predictions, alternatives, and paraphrases with the same prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from factpatch.data.chunked import write_in_chunks
from factpatch.data.formats import PROVENANCE, Record
from factpatch.data.records import refuse_overwriting, source_hash
from factpatch.data.revisions import Neighbour, Provenance, Revision, read_revisions
from factpatch.facts import distinct_from, same
from factpatch.models import Classifier, TaskModel
from factpatch.models.rows import Encoded

CHUNK = {"cpu": 256, "cuda": 4096}  # maximum number of records that are predicted and written together


def revise(
    model: TaskModel,
    source: str | Path,
    output: str | Path,
    skip_bad: bool = False,
    on_done: Callable[[int], object] = lambda records: None,
    gold: bool = False,
) -> dict[str, Any]:
    """Writes the revision file of a data file and returns its counts. A run that was killed resumes where it stopped.

    `on_done` receives the number of records finished since its last call. With `gold`, edits ask for correct answers.
    """
    refuse_overwriting(output, source)
    labels = model.labels if isinstance(model, Classifier) else ()
    settings = {"dtype": str(model.model.dtype).removeprefix("torch.")}
    if model.prompt_template is not None:
        settings["template"] = model.prompt_template
    if gold:
        settings["targets"] = "gold"
    provenance = Provenance(model.identity, source_hash(source), settings)

    def check(record: Record) -> None:
        model.check_input(record.input)
        wanted = [record.alternative] if record.alternative else []
        for target in (*wanted, *record.answers) if labels else wanted:
            model.check_target(target)

    def prepare(chunk: list[Record]) -> tuple[list[Record], dict[str, Encoded]]:
        return with_gold_targets(model, chunk) if gold else chunk, encode_records(model, chunk)

    counts = write_in_chunks(
        source,
        output,
        prepare,
        lambda prepared: [revision.to_json() for revision in revise_records(model, *prepared)],
        settings=asdict(provenance),
        size=CHUNK[model.device.type],
        check=check,
        skip_bad=skip_bad,
        on_done=on_done,
        labels=labels,
        header=provenance.to_json(),
        key=PROVENANCE,
    )
    return {**_summary(output), "records": counts.read, "left_out": counts.left_out, "bad": counts.bad}


def with_gold_targets(model: TaskModel, records: Sequence[Record]) -> list[Record]:
    """Makes the first correct answer that the model can give the alternative of each record without an alternative."""
    sayable = model.valid_targets([answer for record in records for answer in record.answers])
    return [
        record
        if record.alternative
        else replace(record, alternative=next(filter(sayable.__contains__, record.answers), None))
        for record in records
    ]


def encode_records(model: TaskModel, records: Sequence[Record]) -> dict[str, Encoded]:
    """Encodes the inputs, paraphrases and neighbours that the model can read."""
    return model.encode_readable([text for r in records for text in (r.input, *_further_texts(r))])


def _further_texts(record: Record) -> tuple[str, ...]:
    return (*record.rephrases, *record.human_rephrases, *record.neighbours)


def revise_records(
    model: TaskModel, records: Sequence[Record], encoded: dict[str, Encoded] | None = None
) -> list[Revision]:
    """Predicts all inputs, paraphrases and neighbours in a few batches and returns one revision per record."""
    encoded = encode_records(model, records) if encoded is None else encoded
    for record in records:
        if record.input not in encoded:
            model.check_input(record.input)  # raises the reason
    ranked = model.candidates_encoded([encoded[record.input] for record in records])
    further = dict.fromkeys(text for r in records for text in _further_texts(r) if text in encoded)
    best = model.candidates_encoded([encoded[text] for text in further], count=1)
    predictions = {text: outputs[0] for text, outputs in zip(further, best, strict=True)}

    def agreeing(record: Record, rephrases: Sequence[str], prediction: str) -> tuple[str, ...]:
        """Keeps the paraphrases that get the same prediction."""
        same_answer = [text for text in rephrases if text in predictions and same(predictions[text], prediction)]
        return tuple(distinct_from(record.input, same_answer))

    def human_paraphrases(record: Record, prediction: str) -> tuple[str, ...]:
        """Keeps the human paraphrases with the same prediction, or all if the data names the answer to edit to."""
        if record.alternative is None:
            return agreeing(record, record.human_rephrases, prediction)
        return tuple(distinct_from(record.input, [text for text in record.human_rephrases if text in predictions]))

    return [
        Revision(
            id=record.id,
            input=record.input,
            prediction=(prediction := outputs[0]),
            alternatives=alternatives(model, record, outputs),
            rephrases=agreeing(record, record.rephrases, prediction),
            human_rephrases=human_paraphrases(record, prediction),
            answers=record.answers,
            neighbours=tuple(Neighbour(text, predictions[text]) for text in record.neighbours if text in predictions),
            subject=record.subject,
            relation=record.relation,
            target=record.alternative,
        )
        for record, outputs in zip(records, ranked, strict=True)
    ]


def alternatives(model: TaskModel, record: Record, outputs: Sequence[str]) -> tuple[str, ...]:
    """Returns the data's own alternative, if any, then the labels or beams that differ from the prediction."""
    labels = model.labels if isinstance(model, Classifier) else ()
    wanted = [record.alternative] if record.alternative else []
    return tuple(distinct_from(outputs[0], filter(str.strip, (*wanted, *outputs[1:], *labels))))


def _summary(output: str | Path) -> dict[str, Any]:
    kept = 0
    counts = dict.fromkeys(("with_alternative", "with_paraphrase", "with_human_paraphrase"), 0)
    for revision in read_revisions(output):
        kept += 1
        counts["with_alternative"] += bool(revision.alternatives)
        counts["with_paraphrase"] += bool(revision.rephrases or revision.human_rephrases)
        counts["with_human_paraphrase"] += bool(revision.human_rephrases)
    return {"kept": kept, **{key: count / kept for key, count in counts.items()}}
