"""The commands patch merge, ledger and bench merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ran
from samples import write_lines

from factpatch import demo
from factpatch.data.revisions import edit_of
from factpatch.editors import Looped, load_editor
from factpatch.models import load_model
from factpatch.patch import Patch

Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def world_patches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = load_model("world", "cpu")
    revisions = demo.counterfactual(model, 3, seed=1)
    folder = tmp_path_factory.mktemp("patches")
    paths = []
    for i, patch in enumerate(Looped(load_editor("world")).propose(model, [edit_of(r) for r in revisions])):
        paths.append(folder / f"{i}.safetensors")
        patch.save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from factpatch import world

    lines = [{"input": fact.questions[0]} for fact in world.facts()[:300]]
    return write_lines(tmp_path_factory.mktemp("others") / "others.jsonl", lines)


def test_patch_merge_writes_one_patch_that_holds_all_facts(
    run: Run, world_patches: list[Path], others: Path, tmp_path: Path
) -> None:
    one, two, kept = tmp_path / "one", tmp_path / "two", tmp_path / "covariance.safetensors"
    common = ("--model", "world", "--others", others, "--covariance", kept, "--max-others", 150, "--device", "cpu")
    first = run("patch", "merge", *world_patches, *common, "--output", one, "--json").json
    assert (first["facts"], first["lost"], first["others"]) == (3, 0, 150)
    second = run("patch", "merge", *world_patches[::-1], *common, "--output", two, "--json").json
    assert second["lost"] == 0
    assert Patch.load(one) == Patch.load(two), "the order of patches and the reused covariance change nothing"
    shown = run("patch", "show", one, "--json").json
    assert len(shown["edits"]) == 3
    three, four = tmp_path / "three", tmp_path / "four"
    smaller = run("patch", "merge", *world_patches, *common, "--output", three, "--smallest", "--mode", "sequence")
    assert "3 of 3 facts hold" in " ".join(smaller.out.split())
    run("patch", "merge", *world_patches, *common, "--output", four, "--refine", 2)
    assert Patch.load(four).method == f"{Patch.load(one).method}, refined"


def test_patch_merge_refuses_in_one_line(run: Run, world_patches: list[Path], checker: Path, tmp_path: Path) -> None:
    out = ("--output", tmp_path / "merged")
    missing = run("patch", "merge", *world_patches, "--model", checker, *out)
    assert missing.code == 1
    assert "patch was made for weights" in missing.err
    empty = write_lines(tmp_path / "empty.jsonl", [])
    assert "has no inputs" in run("patch", "merge", *world_patches, "--model", "world", "--others", empty, *out).err
    wrong = run("patch", "merge", *world_patches, "--model", "world", "--covariance", world_patches[0], *out)
    assert "is not a covariance file" in wrong.err
    assert wrong.err.count("\n") == 1
    assert not (tmp_path / "merged").exists()


def test_a_ledgers_life(run: Run, others: Path, tmp_path: Path) -> None:
    ledger = ("--ledger", tmp_path / "facts.db")
    model = ("--model", "world", "--device", "cpu")
    init = ("ledger", "init", *ledger, *model, "--others", others, "--refine", 2, "--json")
    assert run(*init).json["others"] == 300
    assert "exists already" in run("ledger", "init", *ledger, *model, "--others", others).err
    question = "What is the capital of Burundi?"
    add = ("ledger", "add", *ledger, *model, "--editor", "world", "--json")
    (fact,) = run(*add, "--input", question, "--target", "Gitega", "--note", "2019").json["facts"]
    assert (fact["x"], fact["target"], fact["before"], fact["status"]) == (question, "Gitega", "Bujumbura", "active")
    lines = [{"input": "What is the currency of Japan?", "target": "euro"}]
    (second,) = run(*add, "--facts", write_lines(tmp_path / "facts.jsonl", lines)).json["facts"]
    listed = run("ledger", "list", *ledger, "--json").json["facts"]
    assert [line["id"] for line in listed] == [fact["id"], second["id"]]
    verified = run("ledger", "verify", *ledger, *model, "--others", others, "--max-others", 50, "--json").json
    assert (verified["facts"], verified["lost"]) == (2, 0)
    assert verified["others_unchanged"] >= 0.9 * verified["others"] > 0
    assert run("ledger", "export", *ledger, *model, "--output", tmp_path / "p", "--json").json["facts"] == 2
    adapter = ("ledger", "export", *ledger, *model, "--output", tmp_path / "adapter", "--rank", 8)
    assert "belong to --peft" in run(*adapter).err
    exported = run(*adapter, "--peft", "--others", others, "--max-others", 50, "--json").json
    assert (exported["edits"], exported["rank"], exported["before"]["success"]) == (2, 8, 1)
    assert exported["kept"] < 1
    assert run("ledger", "remove", *ledger, second["id"], "--json").json["facts"][0]["status"] == "removed"
    shown = run("ledger", "show", *ledger, second["id"], "--json").json
    assert [event["event"] for event in shown["history"]] == ["added", "removed"]
    assert "Burundi" in run("ledger", "list", *ledger).out
    assert run("ledger", "apply", *ledger, *model, "--output", tmp_path / "patched", "--json").json["facts"] == 1
    assert load_model(tmp_path / "patched", "cpu").predict([question]) == ["Gitega"]
    for arguments, message in (
        (("remove", *ledger, 77), "there is no fact 77"),
        (("remove", *ledger, second["id"]), "is already removed"),
        (("list", "--ledger", tmp_path / "none.db"), "no ledger at"),
        (("show", *ledger, second["id"], "--device", "potato"), "expected a device"),
    ):
        refused = run("ledger", *arguments)
        assert refused.code == 1
        assert message in refused.err
        assert refused.err.count("\n") == 1


def test_a_ledger_of_patches_from_another_method(run: Run, others: Path, tmp_path: Path) -> None:
    """A model without a trained editor can have a ledger, too."""
    given = ("--ledger", tmp_path / "facts.db", "--model", "world", "--device", "cpu")
    assert run("ledger", "init", *given, "--others", others, "--max-others", 40, "--mode", "sequence").code == 0
    fact = ("--input", "What is the capital of Burundi?", "--target", "Gitega")
    add = ("ledger", "add", *given, *fact, "--method", "finetune")
    added = run(*add, "--set", "lr=1e-3", "--others", others, "--max-others", 40, "--json").json
    assert (added["facts"][0]["target"], added["lost_facts"]) == ("Gitega", [])
    assert run("ledger", "verify", *given, "--others", others, "--max-others", 40, "--json").json["lost"] == 0
    for arguments, code, reason in (
        ((*add, "--editor", "world"), 2, "give either --editor, or a --method"),
        (("ledger", "add", *given, *fact), 2, "give either --editor, or a --method"),
        (("ledger", "add", *given, *fact, "--method", "memit"), 1, "name a revision file with --others"),
    ):
        refused = run(*arguments)
        assert refused.code == code
        assert reason in " ".join(refused.err.replace("│", " ").split())


def test_facts_that_the_merge_loses_are_named(run: Run, others: Path, tmp_path: Path) -> None:
    given = ("--ledger", tmp_path / "facts.db", "--model", "world", "--device", "cpu")
    assert run("ledger", "init", *given, "--others", others, "--max-others", 40, "--ridge", 1e6).code == 0
    add = ("ledger", "add", *given, "--editor", "world")
    lost = run(*add, "--input", "What is the capital of Burundi?", "--target", "Gitega", "--json")
    assert lost.json["lost_facts"] == [1]
    assert "In the merged patch, 1 of 1 new fact did not hold" in lost.err


def test_bench_merge_reports_its_keys(run: Run) -> None:
    found = run("bench", "merge", "--shape", "minilm", "--facts", 2, "--tokens", 4, "--device", "cpu", "--json").json
    assert found["merge_seconds"] > 0
    assert found["facts_per_second"] == pytest.approx(2 / found["merge_seconds"])
    assert found["patch_bytes"] > 0
