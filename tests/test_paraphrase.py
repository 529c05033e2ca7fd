"""Paraphrases by round-trip translation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import fact_checker, fever, read_lines, texts, write_lines

from factpatch.data import paraphrase as module
from factpatch.data.paraphrase import RoundTrip, paraphrase
from factpatch.data.records import read_records
from factpatch.errors import InputError, ModelError
from factpatch.facts import normalize
from factpatch.models import load_model


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> RoundTrip:
    """Two models that can write the long translations that random weights make."""
    return translators(tmp_path_factory.mktemp("models"), max_position_embeddings=128)


def translators(folder: Path, **overrides: Any) -> RoundTrip:
    for seed, name in enumerate(["forward", "backward"]):
        tiny.build("marian", seed, **overrides).save(folder / name)
    return RoundTrip(load_model(folder / "forward", "cpu"), load_model(folder / "backward", "cpu"))


def assert_paraphrases_of(text: str, found: list[str]) -> None:
    assert len(found) <= 25
    normalized = [normalize(paraphrase) for paraphrase in found]
    assert len(set(normalized)) == len(normalized)
    assert normalize(text) not in normalized
    assert all(found)


def test_paraphrases_are_ordered_by_the_sum_of_their_ranks() -> None:
    back = {
        "p0": ["a", "b", "c", "d", "e"],  # ranks 0 to 4
        "p1": ["f", "g", "h", "i", "j"],  # ranks 1 to 5
        "p2": ["k", "l", "m", "n", "o"],  # ranks 2 to 6
    }
    ordered = RoundTrip._ordered("text", ["p0", "p1", "p2"], back)
    assert ordered == ["a", "b", "f", "c", "g", "k", "d", "h", "l", "e", "i", "m", "j", "n", "o"]


def test_copies_and_duplicates_are_removed() -> None:
    back = {"p0": ["Is it so?", "text!", "is it so", "", "new"], "p1": ["Text", "NEW", "another", "is it so ?", "new"]}
    assert RoundTrip._ordered("text", ["p0", "p1", "", "unknown"], back) == ["Is it so?", "NEW", "another"]


def test_the_best_rank_of_a_duplicate_counts() -> None:
    back = {"p0": ["a", "b", "c", "d", "late"], "p1": ["late", "x"]}
    assert RoundTrip._ordered("text", ["p0", "p1"], back) == ["a", "b", "late", "c", "x", "d"]


def test_each_text_goes_there_and_back_with_five_beams(round_trip: RoundTrip) -> None:
    inputs = texts(6, longest=5)
    found = round_trip.paraphrases(inputs)
    assert len(found) == len(inputs)
    for text, ranked in zip(inputs, found, strict=True):
        assert_paraphrases_of(text, ranked)
    assert max(map(len, found)) > 5, "paraphrases come from more than one translation"

    there = round_trip.forward.candidates(inputs)
    pivots = [pivot for ranked in there for pivot in ranked if pivot]
    back = dict(zip(pivots, round_trip.backward.candidates(pivots), strict=True))
    assert all(len(beams) == 5 for beams in [*there, *back.values()])
    for ranked, beams in zip(found, there, strict=True):
        assert set(ranked) <= {paraphrase for pivot in beams if pivot for paraphrase in back[pivot]}


@pytest.mark.parametrize("positions", [40, 128])
def test_a_long_text_among_short_ones(tmp_path: Path, positions: int) -> None:
    """Translations longer than the models can read or write cost paraphrases, not the run."""
    round_trip = translators(tmp_path, max_position_embeddings=positions)
    inputs = [*texts(3), *texts(1, shortest=34, longest=34)]
    assert max(round_trip.forward.lengths(inputs)) == 35
    for text, ranked in zip(inputs, round_trip.paraphrases(inputs), strict=True):
        assert_paraphrases_of(text, ranked)


def test_a_classifier_is_no_translator(round_trip: RoundTrip, tmp_path: Path) -> None:
    classifier = load_model(fact_checker(tmp_path / "model"), "cpu")
    for models in ([classifier, round_trip.backward], [round_trip.forward, classifier]):
        with pytest.raises(ModelError, match="expected a translation model, found a classifier"):
            RoundTrip(*models)


def test_records_keep_everything_but_their_paraphrases(round_trip: RoundTrip, tmp_path: Path) -> None:
    claims = texts(5, longest=5)
    lines = [fever(i, claim, "SUPPORTS") for i, claim in enumerate(claims)]
    lines[0]["human_rephrases"] = ["by hand"]
    lines[1]["rephrases"] = ["of an earlier run"]
    lines[2]["output"][0]["answer"] = "NOT ENOUGH INFO"
    source = write_lines(tmp_path / "in.jsonl", lines)
    result = paraphrase(round_trip, source, tmp_path / "out.jsonl")
    made = list(read_records(tmp_path / "out.jsonl"))
    before = list(read_records(source))
    assert [(r.id, r.input, r.answers, r.human_rephrases) for r in made] == [
        (r.id, r.input, r.answers, r.human_rephrases) for r in before
    ]
    for record in made:
        assert_paraphrases_of(record.input, list(record.rephrases))
    assert made[0].human_rephrases == ("by hand",)
    assert "of an earlier run" not in made[1].rephrases
    numbers = [len(record.rephrases) for record in made]
    assert max(numbers) > 0
    assert (result["records"], result["kept"], result["left_out"], result["bad"]) == (5, 4, 1, 0)
    assert result["with_paraphrase"] == sum(n > 0 for n in numbers) / 4
    assert result["with_five_paraphrases"] == sum(n >= 5 for n in numbers) / 4


class Translated:
    """Records what is translated; fails at one of the chunks if asked to."""

    def __init__(self, round_trip: RoundTrip, fail_at: int = 0):
        self.texts: list[str] = []
        self.chunks, self.fail_at = 0, fail_at
        self.real = round_trip.paraphrases

    def __call__(self, inputs: list[str]) -> list[list[str]]:
        self.chunks += 1
        if self.chunks == self.fail_at:
            raise RuntimeError("the machine went down")
        self.texts += inputs
        return self.real(inputs)


def test_a_run_resumes_where_it_stopped(round_trip: RoundTrip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK, "cpu", 2)
    source = write_lines(tmp_path / "in.jsonl", [{"input": text} for text in texts(7, longest=5)])
    paraphrase(round_trip, source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    output.write_text('{"rephrases": []}')
    with monkeypatch.context() as patched:
        patched.setattr(round_trip, "paraphrases", Translated(round_trip, fail_at=3))
        with pytest.raises(RuntimeError):
            paraphrase(round_trip, source, output)
    assert output.read_text() == '{"rephrases": []}'

    rest = Translated(round_trip)
    progress: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(round_trip, "paraphrases", rest)
        paraphrase(round_trip, source, output, on_done=progress.append)
    assert len(rest.texts) == 3
    assert progress == [4, 2, 1]
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_first_chunks_are_small(round_trip: RoundTrip, tmp_path: Path) -> None:
    """Progress also counts the claims that are left out."""
    lines = [fever(i, text, "SUPPORTS") for i, text in enumerate(texts(34, longest=3))]
    lines[3]["output"][0]["answer"] = "NOT ENOUGH INFO"
    progress: list[int] = []
    paraphrase(round_trip, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", on_done=progress.append)
    assert progress == [0, 2, 5, 8, 16, 3]


def test_bad_records_are_named_or_skipped(round_trip: RoundTrip, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "who leads france ?"}, {"input": "capital " * 99}])
    with pytest.raises(InputError, match="line 2: the model reads at most 36 tokens"):
        paraphrase(round_trip, source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    result = paraphrase(round_trip, source, tmp_path / "out.jsonl", skip_bad=True)
    assert (result["kept"], result["bad"]) == (1, 1)
    assert len(read_lines(tmp_path / "out.jsonl")) == 1


def turned(round_trip: RoundTrip, folder: Path) -> RoundTrip:
    return RoundTrip(round_trip.backward, round_trip.forward)


def with_other_words(round_trip: RoundTrip, folder: Path) -> RoundTrip:
    """Translators with the same layers and other word embeddings."""
    other = translators(folder, max_position_embeddings=128)
    other.backward.word_embeddings.mul_(1.5)
    assert other.backward.fingerprint == round_trip.backward.fingerprint
    return other


@pytest.mark.parametrize("other_translators", [turned, with_other_words])
def test_other_translators_start_anew(
    round_trip: RoundTrip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_translators: Any
) -> None:
    monkeypatch.setitem(module.CHUNK, "cpu", 2)
    source = write_lines(tmp_path / "in.jsonl", [{"input": text} for text in texts(4, longest=5)])
    with monkeypatch.context() as patched:
        patched.setattr(round_trip, "paraphrases", Translated(round_trip, fail_at=2))
        with pytest.raises(RuntimeError):
            paraphrase(round_trip, source, tmp_path / "out.jsonl")
    other = other_translators(round_trip, tmp_path)
    anew = Translated(other)
    monkeypatch.setattr(other, "paraphrases", anew)
    paraphrase(other, source, tmp_path / "out.jsonl")
    assert len(anew.texts) == 4
