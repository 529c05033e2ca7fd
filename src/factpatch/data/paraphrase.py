"""Paraphrases texts by translating them into another language and back with 5 × 5 beams, as in De Cao et al. (2021)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from factpatch.data.chunked import write_in_chunks
from factpatch.data.formats import Record
from factpatch.data.records import refuse_overwriting, source_hash
from factpatch.errors import ModelError
from factpatch.facts import distinct_from
from factpatch.jsonl import read_jsonl
from factpatch.models import Seq2Seq, TaskModel

CHUNK = {"cpu": 32, "cuda": 2048}  # maximum number of inputs that are translated and written together


class RoundTrip:
    """A pair of translation models: into another language and back."""

    def __init__(self, forward: TaskModel, backward: TaskModel):
        self.forward, self.backward = _translator(forward), _translator(backward)

    def paraphrases(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns up to 25 paraphrases per text, lowest sum of the two beam ranks first, without copies of the text."""
        pivots = self._translate(self.forward, texts)
        back = self._translate(self.backward, [pivot for ranked in pivots.values() for pivot in ranked])
        return [self._ordered(text, pivots.get(text, []), back) for text in texts]

    @staticmethod
    def _translate(model: Seq2Seq, texts: Sequence[str]) -> dict[str, list[str]]:
        """Returns five translations of each text that the model can read."""
        encoded = model.encode_readable(texts)
        # A translation is about as long as its source; a much longer one only repeats itself.
        longest = 2 * max((len(one["input_ids"]) for one in encoded.values()), default=0) + 8
        model.limit_answers(min(longest, model.max_input_tokens - 1))
        return dict(zip(encoded, model.candidates_encoded(list(encoded.values())), strict=True))

    @staticmethod
    def _ordered(text: str, pivots: Sequence[str], back: dict[str, list[str]]) -> list[str]:
        ranked = [
            (i + j, i, paraphrase)
            for i, pivot in enumerate(pivots)
            for j, paraphrase in enumerate(back.get(pivot, []))
            if paraphrase
        ]
        return distinct_from(text, [paraphrase for _, _, paraphrase in sorted(ranked, key=lambda item: item[:2])])


def _translator(model: TaskModel) -> Seq2Seq:
    if not isinstance(model, Seq2Seq):
        raise ModelError(f"expected a translation model, found a {model.kind}; use a MarianMT folder or hub name")
    return model


def paraphrase(
    round_trip: RoundTrip,
    source: str | Path,
    output: str | Path,
    skip_bad: bool = False,
    on_done: Callable[[int], object] = lambda records: None,
) -> dict[str, Any]:
    """Writes the records with new `rephrases` and returns counts. A run that was killed resumes where it stopped.

    `on_done` receives the number of records finished since its last call.
    """
    refuse_overwriting(output, source)
    models = (round_trip.forward, round_trip.backward)

    def work(chunk: list[Record]) -> list[str]:
        paraphrases = round_trip.paraphrases([record.input for record in chunk])
        lines = ({**r.to_dict(), "rephrases": texts} for r, texts in zip(chunk, paraphrases, strict=True))
        return [json.dumps(line, ensure_ascii=False) for line in lines]

    counts = write_in_chunks(
        source,
        output,
        lambda chunk: chunk,
        work,
        settings={
            "data": source_hash(source),
            "models": [model.identity for model in models],
            "dtypes": [str(model.model.dtype) for model in models],
        },
        size=CHUNK[round_trip.forward.device.type],
        check=lambda record: round_trip.forward.check_input(record.input),
        skip_bad=skip_bad,
        on_done=on_done,
        key="rephrases",
    )
    numbers = list(read_jsonl(output, lambda record: len(record["rephrases"])))
    return {
        "records": counts.read,
        "kept": len(numbers),
        "with_alternative": None,  # known only after `revise`
        "with_paraphrase": sum(n > 0 for n in numbers) / len(numbers),
        "with_five_paraphrases": sum(n >= 5 for n in numbers) / len(numbers),
        "left_out": counts.left_out,
        "bad": counts.bad,
    }
