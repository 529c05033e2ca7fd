"""Reading facts: KILT files as published, a user's own JSON lines, CounterFact, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factpatch.errors import FileError, InputError
from factpatch.facts import normalize
from factpatch.files import content_hash
from factpatch.jsonl import read_jsonl, required_text, text_list

NOT_A_FACT = {normalize("NOT ENOUGH INFO")}  # FEVER's third label: neither SUPPORTS nor REFUTES


@dataclass(frozen=True)
class Record:
    """One fact as it was read."""

    id: str
    input: str
    answers: tuple[str, ...] = ()
    rephrases: tuple[str, ...] = ()  # generated
    human_rephrases: tuple[str, ...] = ()  # a question's other templates
    subject: str | None = None
    relation: str | None = None
    alternative: str | None = None  # what the data itself asks to say instead
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The record in KILT's form, with the question as its input and what else was in the line."""
        raw = {} if "requested_rewrite" in self.raw else self.raw
        meta = {**(raw.get("meta") or {}), "subject_entity": self.subject, "relation": self.relation}
        line = {
            **raw,
            "id": self.id,
            "input": self.input,
            "output": raw.get("output") or [{"answer": answer} for answer in self.answers],
            "rephrases": list(self.rephrases),
            "human_rephrases": list(self.human_rephrases),
            "alternative": self.alternative,
            "meta": {key: value for key, value in meta.items() if value is not None},
        }
        return {key: value for key, value in line.items() if value or key in raw}

    @property
    def questions(self) -> list[str]:
        """The input and every human wording of it."""
        return list(dict.fromkeys([self.input, *self.human_rephrases]))


@dataclass
class Counts:
    """What became of the records of a file."""

    kept: int = 0
    left_out: int = 0  # NOT ENOUGH INFO, where that is no label to learn
    bad: int = 0
    ids: set[str] = field(default_factory=set, repr=False)  # all that were seen, in this file and those before it

    @property
    def read(self) -> int:
        return self.kept + self.left_out + self.bad


def read_records(
    source: str | Path,
    counts: Counts | None = None,
    need_answers: bool = False,
    check: Callable[[Record], object] | None = None,
    skip_bad: bool = False,
    labels: Collection[str] = (),
) -> Iterator[Record]:
    """Streams the records of a file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`.

    `check` may raise an InputError for a record that cannot be used; like every bad record it is reported with its
    line, or passed over and counted with `skip_bad`. Two records with one id are bad too. NOT ENOUGH INFO is left out
    and counted, unless it is one of the `labels`.
    """
    counts = Counts() if counts is None else counts
    no_fact = NOT_A_FACT.difference(map(normalize, labels))

    def parse(raw: dict[str, Any]) -> Record | None:
        record = parse_record(raw, f"record-{counts.read + 1}")
        if record.id in counts.ids:
            raise InputError(f"two records have the id {record.id!r}")
        if record.answers and normalize(record.answers[0]) in no_fact:
            counts.ids.add(record.id)
            counts.left_out += 1
            return None
        if need_answers and not record.answers:
            raise InputError('expected an answer in "output", found none')
        if check is not None:
            check(record)
        counts.ids.add(record.id)  # now that it is known to be good; a bad one must not keep a good one out
        counts.kept += 1
        return record

    def on_bad(message: str) -> None:
        counts.bad += 1

    before = counts.kept
    for record in _parsed(str(source), parse, on_bad if skip_bad else None):
        if record is not None:
            yield record
    if counts.kept == before:
        raise InputError(f"{source}: expected at least one record, found none that can be used")


def _parsed(source: str, parse: Callable[[dict[str, Any]], Record | None], on_bad: Any) -> Iterator[Record | None]:
    if not source.startswith("hub:"):
        yield from read_jsonl(source, parse, on_bad)
        return
    for number, raw in enumerate(_hub_rows(source), start=1):
        try:
            yield parse(raw)
        except InputError as error:
            if on_bad is None:
                raise InputError(f"{source}, row {number}: {error}; pass over bad records with --skip-bad") from None
            on_bad(f"{source}, row {number}: {error}")


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError:
        raise InputError(
            "reading from the hub needs the datasets package; install factpatch with its extra hub"
        ) from None
    name, *config, split = source.removeprefix("hub:").split(":") if source.count(":") > 1 else (source[4:], "train")
    try:
        yield from datasets.load_dataset(name, *config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {source}: {error}; expected hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT") from error


def parse_record(raw: dict[str, Any], default_id: str) -> Record:
    """A record of any of the known forms."""
    return _parse_counterfact(raw) if "requested_rewrite" in raw else _parse_kilt(raw, default_id)


def _parse_kilt(raw: dict[str, Any], default_id: str) -> Record:
    """KILT's form, of which a user's own lines with just `input`, and perhaps `output`, are a part."""
    text = required_text(raw, "input").strip()
    if not text:
        raise InputError('expected a text in "input", found an empty one')
    meta = raw.get("meta") or {}
    if not isinstance(meta, dict):
        raise InputError(f'expected an object in "meta", found {type(meta).__name__}')
    questions = text_list(meta, "template_questions")
    if not all(question.strip() for question in questions):
        raise InputError('expected questions in "template_questions", found an empty one')
    subject, relation = _optional_text(meta, "subject_entity"), _optional_text(meta, "relation")
    if " [SEP] " in text and meta.get("template_questions") is not None:
        # zsRE as published: "Germany [SEP] capital", its questions in meta. Without them it is a pair of sentences.
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
        raw=raw,
    )


def _optional_text(record: dict[str, Any], key: str) -> str | None:
    return None if record.get(key) is None else required_text(record, key)


def _answers(raw: dict[str, Any]) -> tuple[str, ...]:
    """KILT writes [{"answer": ...}, ...], some entries without an answer; a text or a list of texts will do too."""
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


def _parse_counterfact(raw: dict[str, Any]) -> Record:
    """CounterFact's form: a prompt with {} in the subject's place, what is true, and what to say instead."""
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
        raw=raw,
    )


def _rewrite_text(raw: dict[str, Any], *keys: str) -> str:
    """A text that a CounterFact record cannot do without."""
    found: Any = raw["requested_rewrite"]
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, str) or not found.strip():
        place = ".".join(("requested_rewrite", *keys))
        raise InputError(f'expected a CounterFact record with a text in "{place}", found {json.dumps(found)[:60]}')
    return found


def count_records(source: str | Path, skip_bad: bool = False) -> int | None:
    """How many there are, for progress bars; None for the hub, where only a download would tell.

    All are read, so that a bad one is named now and not after hours of work. What only a model can tell waits for it:
    whether it can read a text, and whether NOT ENOUGH INFO is one of its labels.
    """
    if str(source).startswith("hub:"):
        return None
    _refuse_pipe(source)
    counts = Counts()
    for _ in read_records(source, counts, skip_bad=skip_bad, labels=NOT_A_FACT):
        pass
    return counts.read


def source_hash(source: str | Path) -> str:
    if str(source).startswith("hub:"):
        return str(source)
    _refuse_pipe(source)
    return content_hash(source)


def _refuse_pipe(source: str | Path) -> None:
    """What is hashed or counted is read again afterwards; a pipe is empty by then."""
    path = Path(source)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(
            f"expected a file, as the data is read more than once, found a pipe at {source}; write it to a file first"
        )


def refuse_overwriting(output: str | Path, *sources: str | Path) -> None:
    """The data must not be lost, under whatever name it is given as the output too."""
    for source in map(Path, sources):
        if source.exists() and Path(output).exists() and source.samefile(output):
            raise FileError(f"expected an output apart from the data, found {output}, which is the data; name another")
