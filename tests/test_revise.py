"""Making revisions from records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import (
    LABELS,
    answerer,
    counterfact,
    fact_checker,
    fever,
    read_after_provenance,
    read_lines,
    texts,
    write_lines,
)

from factpatch.data import revise as revise_module
from factpatch.data.formats import Record
from factpatch.data.records import count_records
from factpatch.data.revise import alternatives, revise, revise_records
from factpatch.data.revisions import Neighbour, edit_of, read_revisions
from factpatch.errors import FileError, InputError
from factpatch.facts import normalize
from factpatch.models import Classifier, TaskModel, load_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"checker": fact_checker(folder / "checker"), "answerer": answerer(folder / "answerer")}


@pytest.fixture(scope="module", params=["checker", "answerer"])
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TaskModel:
    return load_model(folders[request.param], "cpu")


@pytest.fixture(scope="module")
def checker(folders: dict[str, Path]) -> TaskModel:
    return load_model(folders["checker"], "cpu")


def records_with_rephrases(count: int = 8) -> list[dict[str, Any]]:
    """Records with paraphrases of which some get the same prediction as the input and some do not."""
    others = texts(6 * count, seed=1)
    lines = []
    for i, text in enumerate(texts(count)):
        words = text.split()
        near = [" ".join(words[k:] + words[:k]) for k in range(1, len(words))]
        far = others[6 * i : 6 * i + 6]
        copies = [text.upper(), f"{text} ?"]
        lines.append(
            {
                "id": str(i),
                "input": text,
                "rephrases": [*copies, *near, *far[:3], near[0].title()],
                "human_rephrases": [*far[3:], near[-1], *copies],
            }
        )
    return lines


def agreeing(model: TaskModel, text: str, rephrases: list[str]) -> list[str]:
    """The paraphrases that revise should keep."""
    prediction, *answers = model.predict([text, *rephrases])
    kept = []
    for rephrase, answer in zip(rephrases, answers, strict=True):
        if answer == prediction and normalize(rephrase) not in map(normalize, [text, *kept]):
            kept.append(rephrase)
    return kept


def test_revisions_hold_the_models_predictions(model: TaskModel, tmp_path: Path) -> None:
    lines = records_with_rephrases()
    result = revise(model, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    made = list(read_revisions(tmp_path / "out.jsonl"))
    assert [(r.id, r.input) for r in made] == [(line["id"], line["input"]) for line in lines]
    assert [r.prediction for r in made] == model.predict([line["input"] for line in lines])
    assert all(r.answers == () for r in made)

    for revision, line in zip(made, lines, strict=True):
        assert list(revision.rephrases) == agreeing(model, revision.input, line["rephrases"])
        assert list(revision.human_rephrases) == agreeing(model, revision.input, line["human_rephrases"])
    offered = sum(len(line["rephrases"]) - 3 for line in lines)  # less the copies
    assert 0 < sum(len(r.rephrases) for r in made) < offered, "the sample must have rephrases of both kinds"

    assert result == {
        "records": 8,
        "kept": 8,
        "left_out": 0,
        "bad": 0,
        "with_alternative": sum(bool(r.alternatives) for r in made) / 8,
        "with_paraphrase": sum(bool(r.rephrases or r.human_rephrases) for r in made) / 8,
        "with_human_paraphrase": sum(bool(r.human_rephrases) for r in made) / 8,
    }


def test_alternatives_are_the_other_labels_or_the_other_beams(model: TaskModel) -> None:
    inputs = texts(12, seed=2)
    for revision in revise_records(model, [Record(str(i), text) for i, text in enumerate(inputs)]):
        if isinstance(model, Classifier):
            assert set(revision.alternatives) == set(LABELS) - {revision.prediction}
            continue
        best, *beams = model.candidates([revision.input], 5)[0]
        assert len(beams) == 4
        different = {normalize(beam): beam for beam in reversed(beams) if beam and normalize(beam) != normalize(best)}
        assert list(revision.alternatives) == [beam for beam in beams if beam in different.values()]
        assert revision.alternatives


def test_a_classifiers_alternatives_are_in_its_order(tmp_path: Path) -> None:
    tiny.build("bert", num_labels=7).save(tmp_path / "model")
    model = load_model(tmp_path / "model", "cpu")
    ranked = model.candidates(["what is the capital of burundi ?"], 7)[0]
    (revision,) = revise_records(model, [Record("1", "what is the capital of burundi ?")])
    assert revision.alternatives[:4] == tuple(ranked[1:5])
    assert sorted(revision.alternatives) == sorted(ranked[1:])


def test_beams_equal_to_the_prediction_are_no_alternatives(folders: dict[str, Path]) -> None:
    model = load_model(folders["answerer"], "cpu")
    record = Record("1", "where ?")
    assert alternatives(model, record, ["Paris", "paris.", "Lyon", "", "LYON"]) == ("Lyon",)
    assert alternatives(model, record, ["Paris"] * 5) == ()
    wanted = replace(record, alternative="Gitega")
    assert alternatives(model, wanted, ["Paris", "Lyon", "gitega", "Rome", "Oslo"]) == (
        "Gitega",
        "Lyon",
        "Rome",
        "Oslo",
    )
    assert alternatives(model, wanted, ["gitega.", "Lyon"]) == ("Lyon",)


def test_counterfacts_target_comes_first(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["answerer"], "cpu")
    path = tmp_path / "counterfact.json"
    cases = [counterfact(i, subject, "rundi", "French", []) for i, subject in enumerate(["burundi", "paris"])]
    path.write_text(json.dumps(cases))
    revise(model, path, tmp_path / "out.jsonl")
    for revision in read_revisions(tmp_path / "out.jsonl"):
        assert revision.alternatives[0] == revision.target == "rundi"
        assert len(revision.alternatives) > 1
        assert revision.answers == ("French",)


def test_rephrases_that_the_model_cannot_read_are_dropped(checker: TaskModel) -> None:
    text = "what is the capital of burundi ?"
    short = texts(20)
    alike = [s for s, answer in zip(short, checker.predict(short), strict=True) if [answer] == checker.predict([text])]
    record = Record("1", text, rephrases=("capital " * 99, " ", alike[0]), human_rephrases=("capital " * 35,))
    (revision,) = revise_records(checker, [record])
    assert revision.rephrases == (alike[0],)
    assert revision.human_rephrases == ()


def test_claims_without_enough_info_are_left_out_and_counted(checker: TaskModel, tmp_path: Path) -> None:
    labels = [*LABELS, None, "NOT ENOUGH INFO"]
    lines = [fever(i, text, label) for i, (text, label) in enumerate(zip(texts(4), labels, strict=True))]
    result = revise(checker, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert (result["records"], result["kept"], result["left_out"], result["bad"]) == (4, 3, 1, 0)
    assert result["with_alternative"] == 1
    assert result["with_paraphrase"] == 0
    assert [line["answers"] for line in read_after_provenance(tmp_path / "out.jsonl")] == [[LABELS[0]], [LABELS[1]], []]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (fever(9, "who leads france ?", "PERHAPS"), "the classifier has no label 'PERHAPS'; choose one of REFUTES"),
        (fever(9, "capital " * 99, "SUPPORTS"), "reads at most 36 tokens, this input has 101"),
        ({"input": "who leads france ?", "alternative": "PERHAPS"}, "the classifier has no label 'PERHAPS'"),
        ({"id": "0", "input": "paris"}, "two records have the id '0'"),
        ({"id": "9"}, 'expected a text in "input"'),
    ],
)
def test_bad_records_are_named_or_skipped(
    checker: TaskModel, tmp_path: Path, line: dict[str, Any], reason: str
) -> None:
    good = [fever(i, text, "SUPPORTS") for i, text in enumerate(texts(3))]
    source = write_lines(tmp_path / "in.jsonl", [*good, line])
    output = tmp_path / "out.jsonl"
    with pytest.raises(InputError) as caught:
        revise(checker, source, output)
    assert str(caught.value).startswith(f"{source}, line 4: ")
    assert reason in str(caught.value)
    assert not output.exists()
    output.write_text('{"provenance": []}')
    with pytest.raises(InputError):
        revise(checker, source, output)
    assert output.read_text() == '{"provenance": []}'
    result = revise(checker, source, output, skip_bad=True)
    assert (result["records"], result["kept"], result["bad"]) == (4, 3, 1)
    assert len(read_after_provenance(output)) == 3


def test_a_claim_without_enough_info_is_kept_if_that_is_a_label(tmp_path: Path) -> None:
    model = load_model(fact_checker(tmp_path / "model"), "cpu")
    assert isinstance(model, Classifier)
    model.labels = [LABELS[0], "NOT ENOUGH INFO"]
    source = write_lines(tmp_path / "in.jsonl", [fever(1, "who leads france ?", "NOT ENOUGH INFO")])
    result = revise(model, source, tmp_path / "out.jsonl")
    assert (result["kept"], result["left_out"]) == (1, 0)


def test_an_alternative_that_the_model_cannot_say(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["answerer"], "cpu")
    lines = [{"input": "who leads france ?", "alternative": text} for text in ("paris", "paris " * 99)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    with pytest.raises(InputError, match="line 2: the model answers in at most"):
        revise(model, source, tmp_path / "out.jsonl")
    assert revise(model, source, tmp_path / "out.jsonl", skip_bad=True)["bad"] == 1


def test_a_bad_record_at_the_start_leaves_no_scratch_files(checker: TaskModel, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "paris"}, {"id": "9"}])
    with pytest.raises(InputError, match="line 2"):
        revise(checker, source, tmp_path / "new" / "out.jsonl")
    assert list(tmp_path.iterdir()) == [source]


def test_the_data_is_not_overwritten(checker: TaskModel, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": "paris"}])
    with pytest.raises(FileError, match="is the data file itself; choose another output"):
        revise(checker, source, source)
    assert read_lines(source) == [{"input": "paris"}]


@pytest.mark.parametrize("kept", [7, 8])
def test_progress_counts_all_records(
    checker: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Bad and left-out records count too, both inside a chunk and after the last one."""
    monkeypatch.setitem(revise_module.CHUNK, "cpu", 4)
    good = [{"input": text} for text in texts(kept)]
    left_out = fever("a", "perhaps", "NOT ENOUGH INFO")
    source = write_lines(tmp_path / "in.jsonl", [*good[:2], left_out, {"id": "b"}, *good[2:], {**left_out, "id": "c"}])
    progress: list[int] = []
    result = revise(checker, source, tmp_path / "out.jsonl", skip_bad=True, on_done=progress.append)
    assert progress[:3] == [0, 2, 6]
    assert sum(progress) == result["records"] == count_records(source, skip_bad=True) == kept + 3


def test_the_first_chunks_are_small(checker: TaskModel, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"input": text} for text in texts(300)])
    progress: list[int] = []
    revise(checker, source, tmp_path / "out.jsonl", on_done=progress.append)
    assert progress == [0, 2, 4, 8, 16, 32, 64, 128, 46]


def test_an_empty_file_leaves_the_old_revisions(checker: TaskModel, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "out.jsonl").write_text('{"provenance": []}')
    with pytest.raises(InputError, match="expected at least one record, found none"):
        revise(checker, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"provenance": []}'


def test_neighbours_subjects_and_relations_are_kept(model: TaskModel, tmp_path: Path) -> None:
    """Neighbours with the model's predictions, whether the data has one or several, and again from the file itself."""
    subject = {"subject_entity": "burundi", "relation": "capital"}
    near = ["what is the capital of france ?", "who leads africa ?"]
    lines = [
        {"id": "1", "input": "what is the capital of burundi ?", "meta": {**subject, "same_relation": near}},
        {"id": "2", "input": "who leads burundi ?", "meta": {**subject, "same_relation": near[1]}},
        {"id": "3", "input": "where do people speak rundi ?"},
    ]
    revise(model, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    first, second, third = read_revisions(tmp_path / "out.jsonl")
    expected = [Neighbour(text, said) for text, said in zip(near, model.predict(near), strict=True)]
    assert (first.neighbours, second.neighbours) == (tuple(expected), (expected[1],))
    assert edit_of(replace(first, alternatives=("a",))).subject == "burundi"
    assert (second.relation, third.relation) == ("capital", None)
    assert (third.neighbours, third.subject) == ((), None)
    assert {"neighbours", "subject", "relation"}.isdisjoint(json.loads(third.to_json())), (
        "files without them are as before"
    )
    revise(model, tmp_path / "out.jsonl", tmp_path / "again.jsonl")
    assert list(read_revisions(tmp_path / "again.jsonl")) == [first, second, third]
    bad = {**json.loads(first.to_json()), "neighbours": ["a text"]}
    with pytest.raises(InputError, match='a list of objects with "input" and "prediction"'):
        list(read_revisions(write_lines(tmp_path / "bad.jsonl", [bad])))


def test_human_paraphrases_of_a_record_with_its_own_alternative_are_all_kept(model: TaskModel) -> None:
    text, *others = texts(20)
    prediction, *answers = model.predict([text, *others])
    far = next(other for other, answer in zip(others, answers, strict=True) if answer != prediction)
    target = next(answer for answer in answers if answer != prediction)
    human = (far, text.upper(), far)
    (kept,) = revise_records(model, [Record("1", text, alternative=target, rephrases=(far,), human_rephrases=human)])
    assert kept.human_rephrases == (far,)
    assert kept.rephrases == ()
    (filtered,) = revise_records(model, [Record("1", text, human_rephrases=human)])
    assert filtered.human_rephrases == ()


def test_edits_to_the_correct_answer_keep_every_human_paraphrase(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["answerer"], "cpu")
    human = ["where is the capital of burundi ?", "what is burundi called ?"]
    lines = [
        {"id": "1", "input": "what is the capital of burundi ?", "answers": ["gitega"], "human_rephrases": human},
        {"id": "2", "input": "who leads france ?", "answers": ["paris " * 99, "rundi"]},
        {"id": "3", "input": "who leads africa ?", "answers": ["gitega"], "alternative": "paris"},
    ]
    revise(model, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "gold.jsonl", gold=True)
    found = list(read_revisions(tmp_path / "gold.jsonl"))
    assert [revision.target for revision in found] == ["gitega", "rundi", "paris"]
    assert found[0].human_rephrases == tuple(human)
