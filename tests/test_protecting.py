"""Any edit method in least-squares form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch
from conftest import assert_untouched, loud_editor, weights_of
from samples import revisions, texts, write_revisions

from factpatch.covariance import Covariance
from factpatch.data.revisions import edit_of, editable
from factpatch.editors import FineTune, Looped
from factpatch.facts import FactEdit, same
from factpatch.merging import MERGED, MODES, merge
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.protecting import Protected, protect

OTHERS = texts(40, seed=5)


@pytest.fixture(scope="module", params=["bert", "bart", "gpt2-lm"])
def model(request: pytest.FixtureRequest) -> TaskModel:
    return tiny.build(request.param)


@pytest.fixture(scope="module")
def edits(model: TaskModel) -> list[FactEdit]:
    return [edit_of(revision) for revision in editable(model, revisions(model, 20))[:3]]


def effect(model: TaskModel, patch: Patch, covariance: Covariance) -> float:
    """The mean square of what a patch adds to the layers' outputs for ordinary inputs, summed over all weights."""
    total = 0.0
    for name, delta in patch.deltas.items():
        ΔW, C = delta.dense().double(), covariance.of(name, model.device)
        total += float(torch.einsum("oi,ij,oj->", ΔW, C, ΔW))
    return total


def test_patches_are_merged_one_by_one(model: TaskModel, edits: list[FactEdit]) -> None:
    method, covariance = FineTune(lr=1e-3), Covariance.compute(model, OTHERS)
    weights = weights_of(model)
    found = Protected(method, covariance, ridge=0.3).propose(model, edits)
    assert_untouched(model, weights)
    for plain, patch in zip(method.propose(model, edits), found, strict=True):
        merged = [merge(model, [plain], covariance=covariance, ridge=0.3, mode=mode) for mode in MODES]
        edit = plain.edits[0]
        expected = next(p for p in (*merged, plain) if same(*model.predict_patched([p], [edit.x]), edit.a))
        assert patch.content_hash == expected.content_hash
        assert effect(model, merged[0], covariance) <= effect(model, plain, covariance) * (1 + 1e-6)
    assert any(MERGED in patch.method for patch in found)


def test_patches_that_would_fail_are_left_as_they_were(model: TaskModel, edits: list[FactEdit]) -> None:
    method = FineTune(lr=1e-3)
    found = Protected(method, Covariance.compute(model, OTHERS), ridge=1e12).propose(model, edits)
    assert [patch.content_hash for patch in found] == [p.content_hash for p in method.propose(model, edits)]


def test_a_trained_editor_is_switched_itself(model: TaskModel) -> None:
    editor = loud_editor(model)
    looped = Looped(editor)
    assert protect(looped, model, OTHERS) is looped
    assert editor.least_squares is not None


def test_describing_it(model: TaskModel) -> None:
    protected = protect(FineTune(), model, OTHERS, ridge=0.5)
    assert (protected.name, protected.edits_per_batch(model)) == ("finetune", FineTune().edits_per_batch(model))
    assert protected.describe(model) == {**FineTune().describe(model), "ridge": 0.5}


def test_commands(tmp_path: Path, run) -> None:
    """Methods without training can protect other answers, too, and MEMIT is fitted to a revision file."""
    model = tiny.build("llama")
    model.save(tmp_path / "model")
    data = write_revisions(tmp_path / "data.jsonl", model, 24)
    others = write_revisions(tmp_path / "others.jsonl", model, 30, seed=5)
    (tmp_path / "texts.jsonl").write_text("\n".join(f'{{"input": "{text}"}}' for text in OTHERS))
    (revision, *_) = editable(model, revisions(model, 24))
    given = ["edit", "--model", tmp_path / "model", "--input", revision.input, "--target", revision.alternatives[0]]

    def edited(*options: object) -> Patch:
        saved = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        assert run(*given, *options, "--save", saved, "--keep-failed").code == 0
        return Patch.load(saved)

    tuned: Sequence[object] = ["--method", "finetune", "--set", "lr=1e-3"]
    assert edited(*tuned).content_hash != edited(*tuned, "--others", tmp_path / "texts.jsonl").content_hash
    assert MERGED in edited(*tuned, "--others", "world", "--max-others", 5).method
    assert edited("--method", "memit", "--others", others).method == "memit"
    evaluate = ["evaluate", "--model", tmp_path / "model", "--data", data, "--edits", 3, "--json", *tuned]
    plain = run(*evaluate, "--output", tmp_path / "plain").json
    solved = run(*evaluate, "--others", others, "--ridge", 1, "--output", tmp_path / "solved").json
    assert solved["kl_mean"] != plain["kl_mean"]
    assert solved["retain"] >= plain["retain"]
