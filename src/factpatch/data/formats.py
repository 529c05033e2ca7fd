"""Parses facts in the formats of KILT and CounterFact. Users' own lines follow KILT's.

A format is a function `parse(raw, default_id)` that turns one JSON object into a Record, or returns None if the object
has another format. `factpatch.data.records.FORMATS` lists all formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from factpatch.errors import InputError
from factpatch.jsonl import required_text, text_list

PROVENANCE = "provenance"  # the only key of the first record of a revision file


@dataclass(frozen=True)
class Record:
    """One fact as it was read."""

    id: str
    input: str
    answers: tuple[str, ...] = ()
    rephrases: tuple[str, ...] = ()  # generated paraphrases
    human_rephrases: tuple[str, ...] = ()  # paraphrases written by people, such as a question's other templates
    subject: str | None = None
    relation: str | None = None
    alternative: str | None = None  # the answer to edit to, if the data names one
    neighbours: tuple[str, ...] = ()  # inputs easily confused with this one, whose answers must stay
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # KILT fields to keep when writing

    def to_dict(self) -> dict[str, Any]:
        """Returns the record in KILT's format, together with the other fields of the object it was read from."""
        meta = {
            "same_relation": list(self.neighbours) or None,
            **(self.raw.get("meta") or {}),
            "subject_entity": self.subject,
            "relation": self.relation,
        }
        line = {
            **self.raw,
            "id": self.id,
            "input": self.input,
            "output": self.raw.get("output") or [{"answer": answer} for answer in self.answers],
            "rephrases": list(self.rephrases),
            "human_rephrases": list(self.human_rephrases),
            "alternative": self.alternative,
            "meta": {key: value for key, value in meta.items() if value is not None},
        }
        return {key: value for key, value in line.items() if value or key in self.raw}

    @property
    def questions(self) -> list[str]:
        """The input and all its human paraphrases."""
        return list(dict.fromkeys([self.input, *self.human_rephrases]))


def parse_kilt(raw: dict[str, Any], default_id: str) -> Record:
    """Parses KILT's format. Only `input` is required, so a user's own lines can be as short as `{"input": ...}`.

    CounterFact's simplified form, with `alternative` and `meta.same_relation`, is read here too.
    """
    text = required_text(raw, "input").strip()
    if not text:
        raise InputError('expected a text in "input", found an empty one')
    meta = raw.get("meta") or {}
    if not isinstance(meta, dict):
        raise InputError(f'expected an object in "meta", found {type(meta).__name__}')
    questions = text_list(meta, "template_questions")
    if not all(question.strip() for question in questions):
        raise InputError('expected questions in "template_questions", found an empty one')
    # Revision files use the second key of each pair.
    subject = _optional_text(meta, "subject_entity") or _optional_text(raw, "subject")
    relation = _optional_text(meta, "relation") or _optional_text(raw, "relation")
    if " [SEP] " in text and meta.get("template_questions") is not None:
        # zsRE as published: "Germany [SEP] capital", with questions in meta. Without them, [SEP] joins two sentences.
        subject, relation = text.split(" [SEP] ", 1)
        if not questions:
            raise InputError('expected questions in "template_questions" beside an input with [SEP], found none')
        text = questions[0]
    human = dict.fromkeys([*text_list(raw, "human_rephrases"), *questions])
    return Record(
        id=str(default_id if raw.get("id") is None else raw["id"]),
        input=text,
        answers=_answers(raw),
        rephrases=text_list(raw, "rephrases"),
        human_rephrases=tuple(question for question in human if question != text),
        subject=subject,
        relation=relation,
        alternative=_optional_text(raw, "alternative"),
        neighbours=_neighbours(raw, meta),
        raw=raw,
    )


def _neighbours(raw: dict[str, Any], meta: dict[str, Any]) -> tuple[str, ...]:
    """Returns the neighbours of a data file, a text or a list, or those of a revision file, which have predictions."""
    texts = meta.get("same_relation")
    if texts is not None:
        return (texts,) if isinstance(texts, str) else text_list(meta, "same_relation")
    return tuple(required_text(neighbour, "input") for neighbour in neighbour_objects(raw))


def neighbour_objects(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the neighbours in a line of a revision file."""
    neighbours = [] if raw.get("neighbours") is None else raw["neighbours"]
    if not isinstance(neighbours, list) or not all(isinstance(one, dict) for one in neighbours):
        raise InputError('expected a list of objects with "input" and "prediction" in "neighbours"')
    return neighbours


def _optional_text(record: dict[str, Any], key: str) -> str | None:
    return None if record.get(key) is None else required_text(record, key)


def _answers(raw: dict[str, Any]) -> tuple[str, ...]:
    """Returns the answers from a text, a list of texts or KILT's [{"answer": ...}, ...]; empty ones are dropped."""
    key = "answers" if raw.get("output") is None else "output"
    output = raw.get(key)
    if isinstance(output, str):
        output = [output]
    if output is None:
        return ()
    if not isinstance(output, list):
        raise InputError(f'expected a text or a list in "{key}", found {type(output).__name__}')
    answers = [entry.get("answer") if isinstance(entry, dict) else entry for entry in output]
    if not all(answer is None or isinstance(answer, str) for answer in answers):
        raise InputError(f'expected texts as answers in "{key}"')
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer and answer.strip()))


def parse_counterfact(raw: dict[str, Any], default_id: str) -> Record | None:
    """Parses CounterFact as published: a prompt with {} for the subject, the true answer and the one to edit to."""
    if "requested_rewrite" not in raw:
        return None
    if raw.get("case_id") is None:
        raise InputError('expected a CounterFact record with a "case_id", found none')
    subject = _rewrite_text(raw, "subject")
    return Record(
        id=str(raw["case_id"]),
        input=_rewrite_text(raw, "prompt").replace("{}", subject),
        answers=(_rewrite_text(raw, "target_true", "str").strip(),),
        human_rephrases=text_list(raw, "paraphrase_prompts"),
        subject=subject,
        relation=_optional_text(raw["requested_rewrite"], "relation_id"),
        alternative=_rewrite_text(raw, "target_new", "str").strip(),
        neighbours=text_list(raw, "neighborhood_prompts"),
    )


def _rewrite_text(raw: dict[str, Any], *keys: str) -> str:
    """Returns a required text of a CounterFact record."""
    value: Any = raw["requested_rewrite"]
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value.strip():
        path = ".".join(("requested_rewrite", *keys))
        raise InputError(f'expected a CounterFact record with a text in "{path}", found {json.dumps(value)[:60]}')
    return value
