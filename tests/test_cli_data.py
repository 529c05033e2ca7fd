"""The commands fit, revise, paraphrase and split."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import LABELS, answerer, fact_checker, fever, read_after_provenance, read_lines, texts, write_lines, zsre

from factpatch.models import load_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data files, good and bad."""
    folder = tmp_path_factory.mktemp("home")
    fact_checker(folder / "checker", initializer_range=0.05)
    answerer(folder / "answerer", init_std=0.1, dropout=0.0)
    for seed, name in enumerate(["there", "back"]):
        tiny.build("marian", seed, max_position_embeddings=128).save(folder / name)
    claims = [fever(i, text, LABELS["paris" in text]) for i, text in enumerate(texts(40, longest=5))]
    facts = [
        zsre(i, f"S{i}", f"relation {i % 4}", ["paris"], [f"{text} ?", f"is it {text} ?"])
        for i, text in enumerate(texts(40, seed=1, longest=5))
    ]
    write_lines(folder / "claims.jsonl", claims)
    write_lines(folder / "facts.jsonl", facts)
    write_lines(folder / "bad.jsonl", [*claims, {"id": "40"}, fever(41, "who ?", "NOT ENOUGH INFO")])
    (folder / "empty.jsonl").write_text("")
    return folder


@pytest.fixture
def commands(home: Path, tmp_path: Path):
    """Returns a function that gives each command's arguments for a data file."""

    def arguments(data: Path, output: str = "out") -> dict[str, list[Any]]:
        output_options = ["--output", tmp_path / output, "--device", "cpu"]
        quick = ["--steps", 4, "--batch", 8, "--lr", 1e-3]
        return {
            "fit": ["fit", "--model", home / "checker", "--train", data, *quick, *output_options],
            "revise": ["revise", "--model", home / "checker", "--data", data, *output_options],
            "paraphrase": [
                *["paraphrase", "--data", data, *output_options],
                *["--forward", home / "there", "--backward", home / "back"],
            ],
            "split": ["split", data, "--train", tmp_path / output, "--dev", tmp_path / f"{output}-dev"],
        }

    return arguments


def test_fit_a_fact_checker(run, commands, home: Path, tmp_path: Path) -> None:
    claims = home / "claims.jsonl"
    result = run(*commands(claims)["fit"], "--dev", claims, "--json").json
    assert {"accuracy", "held_out_accuracy", "steps", "records", "left_out", "bad", "seconds"} <= result.keys()
    assert 0 <= result["accuracy"] <= 1
    assert result["seconds"] > 0
    assert (result["records"], result["examples"], result["steps"], result["bad"]) == (40, 36, 4, 0)
    model = load_model(tmp_path / "out", "cpu")
    lines = read_lines(claims)
    answers = model.predict([line["input"] for line in lines])
    right = sum(answer == line["output"][0]["answer"] for answer, line in zip(answers, lines, strict=True))
    assert result["accuracy"] == right / 40
    again = run(*commands(claims)["fit"])
    assert again.code == 1
    assert "in use" in again.err
    assert again.err.count("\n") == 1


def test_fit_a_model_that_answers(run, home: Path, tmp_path: Path) -> None:
    data = ["--train", home / "facts.jsonl", "--dev", home / "facts.jsonl", "--output", tmp_path / "out"]
    options = ["--task", "answer", "--epochs", 1, "--batch", 16, "--lr", 5e-3, "--device", "cpu"]
    result = run("fit", "--model", home / "answerer", *data, *options, "--json").json
    assert 0 <= result["exact_match"] <= 1
    assert result["examples"] == 72, "every question of every fact"
    assert result["steps"] == 5
    assert load_model(tmp_path / "out", "cpu").kind == "seq2seq"


def test_revise_and_paraphrase_count_what_they_kept(run, commands, home: Path, tmp_path: Path) -> None:
    data = home / "claims.jsonl"
    for name in ("paraphrase", "revise"):
        result = run(*commands(data, f"{name}.jsonl")[name], "--json").json
        assert {"records", "kept", "with_alternative", "with_paraphrase", "bad", "seconds"} <= result.keys(), name
        assert (result["records"], result["kept"], result["bad"]) == (40, 40, 0)
        assert 0 <= result["with_paraphrase"] <= 1
        assert result["seconds"] > 0
        read = read_after_provenance if name == "revise" else read_lines
        assert len(read(tmp_path / f"{name}.jsonl")) == 40
        data = tmp_path / f"{name}.jsonl"


def test_paraphrases_go_into_revisions(run, commands, home: Path, tmp_path: Path) -> None:
    made = run(*commands(home / "facts.jsonl", "made.jsonl")["paraphrase"])
    assert made.code == 0, made.err
    offered = {line["id"]: set(line["rephrases"]) for line in read_lines(tmp_path / "made.jsonl")}
    human = {line["id"]: line["human_rephrases"] for line in read_lines(tmp_path / "made.jsonl")}
    revise = commands(tmp_path / "made.jsonl", "revised.jsonl")["revise"]
    revise[revise.index("--model") + 1] = home / "answerer"
    assert run(*revise, "--json").json["kept"] == 40
    for line in read_after_provenance(tmp_path / "revised.jsonl"):
        assert set(line["rephrases"]) <= offered[line["id"]]
        assert set(line["human_rephrases"]) <= set(human[line["id"]])


def test_split_prints_its_counts(run, commands, home: Path, tmp_path: Path) -> None:
    result = run(*commands(home / "facts.jsonl")["split"], "--share", 0.2, "--json").json
    assert isinstance(result.pop("seconds"), float)
    assert result.pop("left_out") == 0
    assert result == {
        "records": 40,
        "bad": 0,
        "train_facts": 32,
        "train_questions": 64,
        "train_relations": 4,
        "dev_facts": 8,
        "dev_questions": 16,
        "dev_relations": 4,
    }
    assert (len(read_lines(tmp_path / "out")), len(read_lines(tmp_path / "out-dev"))) == (32, 8)
    for name in ("out", "out-dev"):
        (tmp_path / name).unlink()
    table = run(*commands(home / "facts.jsonl")["split"])
    assert table.code == 0
    assert "dev questions" in table.out


def test_split_of_two_files_with_one_id(run, commands, home: Path, tmp_path: Path) -> None:
    arguments = commands(home / "facts.jsonl")["split"]
    result = run("split", home / "facts.jsonl", *arguments[1:])
    assert result.code == 1
    assert "facts.jsonl, line 1: two records have the id 'fact-0'" in result.err


@pytest.mark.parametrize("name", ["fit", "revise", "paraphrase", "split"])
def test_bad_data_is_one_line_and_exit_1(run, commands, home: Path, tmp_path: Path, name: str) -> None:
    reasons = {
        "bad.jsonl": 'bad.jsonl, line 41: expected a text in "input", found null; fix it, or skip bad records',
        "empty.jsonl": "empty.jsonl: expected at least one record, found none",
        "none.jsonl": "none.jsonl: No such file",
    }
    for file, reason in reasons.items():
        result = run(*commands(home / file)[name], "--json")
        assert result.code == 1, file
        assert reason in result.err
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1, result.err
        assert not result.out
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out-dev").exists()


@pytest.mark.parametrize("name", ["fit", "revise", "paraphrase", "split"])
def test_bad_records_are_skipped_and_counted(run, commands, home: Path, name: str) -> None:
    result = run(*commands(home / "bad.jsonl")[name], "--skip-bad", "--json").json
    assert (result["records"], result["bad"], result["left_out"]) == (42, 1, 1)


@pytest.mark.parametrize("name", ["revise", "paraphrase", "split"])
def test_the_data_is_not_overwritten(run, commands, home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for written in ("out", "out-dev") if name == "split" else ("out",):
        (tmp_path / written).write_bytes((home / "claims.jsonl").read_bytes())
        for data in {written, "link"} if written == "out" else {written}:
            result = run(*commands(tmp_path / data)[name])
            assert result.code == 1
            assert "is the data file itself; choose another output" in result.err
        assert (tmp_path / written).read_bytes() == (home / "claims.jsonl").read_bytes()
        (tmp_path / written).unlink()


@pytest.mark.parametrize("name", ["revise", "paraphrase"])
def test_bad_data_is_found_before_a_model_is_loaded(run, commands, home: Path, name: str) -> None:
    models = [home / folder for folder in ("checker", "there", "back")]
    arguments = [home / "none" if value in models else value for value in commands(home / "bad.jsonl")[name]]
    assert 'line 41: expected a text in "input"' in run(*arguments).err


def test_fit_learns_not_enough_info_where_it_is_a_label(run, commands, home: Path, tmp_path: Path) -> None:
    lines = read_lines(home / "claims.jsonl")
    data = write_lines(tmp_path / "three.jsonl", [*lines, fever(41, "who ?", "NOT ENOUGH INFO")])
    labels = ["--labels", ",".join([*LABELS, "NOT ENOUGH INFO"])]
    result = run(*commands(data)["fit"], *labels, "--json").json
    assert (result["records"], result["left_out"]) == (41, 0)


def test_split_reports_progress(run, commands, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[int] = []

    @contextmanager
    def bar(message: str, total: int | None) -> Iterator[Any]:
        yield progress.append

    monkeypatch.setattr("factpatch.cli.common.progress_bar", bar)
    monkeypatch.setattr(sys.modules["factpatch.cli.split"], "REPORT_EVERY", 15)
    assert run(*commands(home / "facts.jsonl")["split"]).code == 0
    assert progress == [15, 15]


def test_other_mistakes_are_one_line_and_exit_1(
    run, commands, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    claims = home / "claims.jsonl"
    wrong_label = write_lines(tmp_path / "label.jsonl", [fever(1, "who ?", "PERHAPS")])
    no_translator = commands(claims)["paraphrase"]
    no_translator[no_translator.index("--forward") + 1] = home / "checker"
    cases = {
        "lr=-1.0 must be above 0; batch=0 must be above 0": ["--lr", -1, "--batch", 0],
        "nothing to resume": ["--resume"],
    }
    results = {reason: run(*commands(claims)["fit"], *options) for reason, options in cases.items()}
    results["line 1: the classifier has no label 'PERHAPS'"] = run(*commands(wrong_label)["revise"])
    results["expected a translation model"] = run(*no_translator)
    results["expected a share between 0 and 1"] = run(*commands(home / "facts.jsonl")["split"], "--share", 2)
    results["needs the datasets package"] = run(*commands(Path("hub:kilt:train"))["revise"])
    for reason, result in results.items():
        assert result.code == 1, reason
        assert reason in result.err
        assert result.err.count("\n") == 1, result.err
        assert not (tmp_path / "out").exists()


def test_wrong_usage_is_exit_2(run, home: Path, tmp_path: Path) -> None:
    for command in ("fit", "revise", "paraphrase", "split"):
        assert run(command).code == 2
        assert run(command, "--nonsense").code == 2
    output_options = ["--output", tmp_path / "out"]
    assert run("fit", "--model", home / "checker", "--train", "x", *output_options, "--steps", "many").code == 2
    assert run("revise", "--model", home / "checker", *output_options).code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["fit", "revise", "paraphrase"])
def test_tables_for_people(run, commands, home: Path, name: str) -> None:
    result = run(*commands(home / "claims.jsonl")[name])
    assert result.code == 0, result.err
    assert "records" in result.out
    assert "40" in result.out


@pytest.mark.parametrize("name", ["revise", "paraphrase", "split"])
def test_tables_explain_bad_and_left_out(run, commands, home: Path, name: str) -> None:
    result = run(*commands(home / "bad.jsonl")[name], "--skip-bad")
    assert result.code == 0, result.err
    for text in (r"left out\W+1\b", r"bad\W+1\b", "left out: claims labelled NOT ENOUGH INFO", "bad: records that"):
        assert re.search(text, result.out), result.out
