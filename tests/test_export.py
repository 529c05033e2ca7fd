"""Patches as LoRA adapters: PEFT computes what the patch computes, and truncation is the SVD's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, loud_editor
from safetensors.torch import load_file
from samples import texts, write_lines

from factpatch.deltas import Dense, LowRank
from factpatch.editors import HyperNetwork
from factpatch.errors import FileError, InputError, MismatchError, ModelError
from factpatch.export import CONFIG, RANKS, WEIGHTS, Adapter, singular_values
from factpatch.facts import FactEdit
from factpatch.merging import merge
from factpatch.models import TaskModel, load_model
from factpatch.patch import Patch

Run = Callable[..., Ran]


@pytest.fixture(params=["factored", "merged", "dense"])
def patch(request: pytest.FixtureRequest, model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]) -> Patch:
    patches = editor.propose(model, edits)
    if request.param == "merged":
        return merge(model, patches, others=texts(20))
    if request.param == "factored":
        return patches[0]
    some = list(patches[0].deltas)[::2]  # as fine-tuning makes it: of full rank, here in every second weight
    noise = {name: 0.05 * torch.randn(patches[0].deltas[name].shape) for name in some}
    return replace(patches[0], deltas={name: Dense(delta) for name, delta in noise.items()})


def logits(model: TaskModel, edits: list[FactEdit]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.rows(QUESTIONS, [edit.a for edit in edits]))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allows a difference of 1e-5 of the largest logit."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def with_adapter(architecture: str, folder: Path, merged: bool = False) -> TaskModel:
    """A new model into which PEFT has loaded the adapter, and merged it if asked to."""
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    model = tiny.build(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as PEFT's about missing tensors or a wrong fan_in_fan_out
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        loaded = peft.PeftModel.from_pretrained(model.model, folder)
        adapted = {name for name, module in model.model.named_modules() if hasattr(module, "lora_A")}
        assert adapted == set(json.loads((folder / CONFIG).read_text())["target_modules"])
        if merged:
            loaded.merge_and_unload()
    return model


def test_peft_computes_what_the_patch_computes(
    architecture: str, model: TaskModel, patch: Patch, edits: list[FactEdit], tmp_path: Path
) -> None:
    """One test for exact and truncated adapters: most of its time goes into making the patch."""
    before = logits(model, edits)
    with patch.applied(model):
        expected = logits(model, edits)
    assert (expected - before).abs().max() > 0.01, "the patch changes something"
    assert patch.export_peft(tmp_path / "exact", model=model).kept == 1
    assert_same(logits(with_adapter(architecture, tmp_path / "exact"), edits), expected)
    assert_same(logits(with_adapter(architecture, tmp_path / "exact", merged=True), edits), expected)

    adapter = patch.export_peft(tmp_path / "truncated", rank=8, model=model)
    total = sum(float(delta.norm()) ** 2 for delta in patch.deltas.values())
    best, lost = {}, 0.0
    for name, delta in patch.deltas.items():
        U, S, Vt = torch.linalg.svd(delta.dense().double(), full_matrices=False)
        best[name] = Dense(((U[:, :8] * S[:8]) @ Vt[:8]).float())
        lost += float(S[8:].square().sum())
    assert adapter.kept == pytest.approx(1 - lost / total, abs=1e-6)
    with replace(patch, deltas=best).applied(model):
        expected = logits(model, edits)
    assert_same(logits(with_adapter(architecture, tmp_path / "truncated"), edits), expected)


def test_one_rank_for_all_weights_filled_up_with_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    narrow, wide = (LowRank(torch.randn(rank, 40), torch.randn(rank, 30)) for rank in (3, 9))
    patch = Patch({"a.weight": narrow, "b.c.weight": wide}, "base", "test", ())
    patch.export_peft(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["use_dora"]) == (16, 16, "none", False)
    assert config["target_modules"] == ["a", "b.c"]
    assert tensors.keys() == {f"base_model.model.{m}.lora_{f}.weight" for m in ("a", "b.c") for f in "AB"}
    A, B = (tensors[f"base_model.model.a.lora_{factor}.weight"] for factor in "AB")
    assert (A.shape, B.shape) == ((16, 40), (30, 16))
    assert torch.equal(A[:3], narrow.A)
    assert torch.equal(B.T[:3], narrow.B)
    assert not A[3:].any()
    assert not B[:, 3:].any()


@pytest.mark.parametrize("rank", [3, 60])
def test_singular_values_of_factors_are_those_of_the_product(rank: int) -> None:
    torch.manual_seed(0)
    delta = LowRank(torch.randn(rank, 40), torch.randn(rank, 30))
    U, S, Vt = singular_values(delta)
    most = min(rank, 30)
    assert len(S) == most
    torch.testing.assert_close(S, torch.linalg.svdvals(delta.dense().double())[:most], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(((U * S) @ Vt).float(), delta.dense(), rtol=1e-4, atol=1e-4)


def test_a_dense_change_of_low_rank_needs_no_more_than_that_rank() -> None:
    torch.manual_seed(0)
    low = LowRank(torch.randn(20, 300), torch.randn(20, 200))
    adapter = Adapter.of({"w": Dense(low.dense())})
    assert (adapter.rank, adapter.deltas["w"].rank, adapter.kept) == (32, 20, 1)
    unchanged = Adapter.of({"w": Dense(torch.zeros(20, 30))})
    assert (unchanged.rank, unchanged.kept) == (8, 1)


def test_a_rank_that_servers_do_not_accept_can_be_truncated() -> None:
    change = {"w": Dense(torch.eye(600)), "v": LowRank(torch.eye(3, 600), torch.eye(3, 600))}
    adapter = Adapter.of(change, truncate=True)
    assert (adapter.rank, adapter.deltas["w"].rank, adapter.deltas["v"].rank) == (RANKS[-1], RANKS[-1], 3)
    assert adapter.kept == pytest.approx((RANKS[-1] + 3) / (600 + 3))
    assert Adapter.of({"v": change["v"]}, truncate=True).kept == 1


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    model = tiny.build("bert")
    patch = loud_editor(model).propose(model, [FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))])[0]
    out = tmp_path / "adapter"
    for rank in (0, -1, 7, 1024):
        with pytest.raises(InputError, match="expected a rank among 8, 16"):
            patch.export_peft(out, rank=rank)
    with pytest.raises(MismatchError, match="patch was made for weights"):
        patch.export_peft(out, model=tiny.build("bert", seed=1))
    with pytest.raises(InputError, match="changes no weights"):
        replace(patch, deltas={}).export_peft(out)
    with pytest.raises(InputError, match=f"has rank 600, but servers accept at most {RANKS[-1]}"):
        replace(patch, deltas={"w": Dense(torch.eye(600))}).export_peft(out)
    assert not list(tmp_path.iterdir()), "nothing is half written"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(FileError, match="contains other files, such as mine"):
        patch.export_peft(out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]


@pytest.fixture(scope="module")
def made(checker: Path) -> Path:
    """A patch for the tiny classifier of claims, in a file."""
    model = load_model(checker, "cpu")
    question = "paris is a city in africa"
    patch = loud_editor(model).propose(model, [FactEdit(question, tiny.other_answer(model, question))])[0]
    patch.save(checker.parent / "patch.safetensors")
    return checker.parent / "patch.safetensors"


def test_the_command_says_what_truncation_costs(run: Run, checker: Path, made: Path, tmp_path: Path) -> None:
    (edit,) = Patch.load(made).edits
    wordings = {"input": edit.x, "rephrases": ["the city in africa is paris"], "human_rephrases": []}
    others = write_lines(tmp_path / "others.jsonl", [wordings, *({"input": text} for text in texts(30))])
    common = ("patch", "export", made, "--model", checker, "--others", others, "--device", "cpu")
    exact = run(*common, "--output", tmp_path / "exact", "--json").json
    assert (exact["rank"], exact["kept"], exact["edits"]) == (16 if Patch.load(made).rank > 8 else 8, 1, 1)
    assert exact["before"] == exact["after"]
    assert exact["bytes"] == sum(file.stat().st_size for file in (tmp_path / "exact").iterdir())
    assert None not in exact["before"].values()
    assert exact["retain_inputs"] == 30, "the patch's own input is not a control input"
    few = run(*common, "--output", tmp_path / "few", "--max-others", 10)
    assert "the whole change" in " ".join(few.out.split())
    without = run(*common[:5], "--output", tmp_path / "without", "--json").json
    assert without["before"]["retain"] is None
    assert without["before"]["equivalence"] is None


def test_the_command_refuses_in_one_line(run: Run, checker: Path, made: Path, base: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("mine")
    new = tmp_path / "new"
    for arguments, message in (
        (("--model", checker, "--output", used), "found"),
        (("--model", checker, "--output", new, "--rank", 0), "expected a rank among"),
        (("--model", base, "--output", new), "patch was made for weights"),
        (("--model", tmp_path / "none", "--output", new), "expected a model folder"),
    ):
        refused = run("patch", "export", made, *arguments)
        assert (refused.code, refused.err.count("\n")) == (1, 1)
        assert message in refused.err
    assert not new.exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_model_is_refused(dtype: torch.dtype) -> None:
    model = tiny.build("bert").model
    layer = model.bert.encoder.layer[0].output.dense
    layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    with pytest.raises(ModelError, match="load the model unquantised"):
        type(tiny.build("bert"))(model, tiny.tokenizer(True))
