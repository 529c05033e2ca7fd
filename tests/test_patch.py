"""Patches: reversible, storable, addable, and refused where they do not belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from factpatch.deltas import Dense, LowRank, add
from factpatch.editors import HyperNetwork
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.patch import Patch, checksum, stack_patches


@pytest.fixture
def bert() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture
def patches(bert: TaskModel) -> list[Patch]:
    return loud_editor(bert).propose(bert, [FactEdit(x, tiny.other_answer(bert, x)) for x in QUESTIONS])


def test_apply_then_revert_is_bit_equal(model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]) -> None:
    patch = editor.propose(model, edits)[0]
    before = weights_of(model)
    patch.apply(model)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())
    patch.revert(model)
    assert_untouched(model, before)
    assert not model.patches
    assert not model.originals


def test_a_patch_in_the_weights_says_what_it_says_in_the_forward(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]
) -> None:
    patches = editor.propose(model, edits)
    said = model.predict_patched(patches, [edit.x for edit in edits])
    for patch, edit, answer in zip(patches, edits, said, strict=True):
        with patch.applied(model):
            assert model.predict([edit.x]) == [answer]


def test_save_then_load_is_equal(model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], tmp_path: Path) -> None:
    patch = editor.propose(model, edits)[1]
    patch.save(tmp_path / "one.safetensors")
    loaded = Patch.load(tmp_path / "one.safetensors")
    assert (loaded.base, loaded.method, loaded.edits) == (patch.base, patch.method, patch.edits)
    assert loaded.deltas.keys() == patch.deltas.keys()
    for name, delta in patch.deltas.items():
        for part, tensor in delta.tensors.items():
            assert torch.equal(loaded.deltas[name].tensors[part], tensor)
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"], "no scratch file is left behind"


def test_reverting_any_patch_leaves_the_others_as_if_it_had_never_been(bert: TaskModel, patches: list[Patch]) -> None:
    first, second, third = patches
    for patch in (first, third):
        patch.apply(bert)
    expected = weights_of(bert)
    for patch in (third, first):
        patch.revert(bert)
    for patch in (first, second, third):
        patch.apply(bert)
    second.revert(bert)
    assert_untouched(bert, expected)


def test_applied_reverts_when_the_block_raises(bert: TaskModel, patches: list[Patch]) -> None:
    before = weights_of(bert)
    with pytest.raises(ZeroDivisionError), patches[0].applied(bert):
        _ = 1 / 0
    assert_untouched(bert, before)


def test_a_failure_half_way_through_apply_changes_nothing(bert: TaskModel, patches: list[Patch]) -> None:
    class Broken(LowRank):
        def dense(self) -> torch.Tensor:
            raise MemoryError

    before = weights_of(bert)
    name, delta = list(patches[0].deltas.items())[-1]
    assert isinstance(delta, LowRank)
    broken = Patch({**patches[0].deltas, name: Broken(delta.A, delta.B)}, bert.fingerprint, "hyper", patches[0].edits)
    with pytest.raises(MemoryError):
        broken.apply(bert)
    assert_untouched(bert, before)
    assert not bert.patches
    assert not bert.originals


def test_the_sum_of_patches_is_both(bert: TaskModel, patches: list[Patch]) -> None:
    both = patches[0] + patches[1]
    assert both.edits == (*patches[0].edits, *patches[1].edits)
    for name, delta in both.deltas.items():
        expected = patches[0].deltas[name].dense() + patches[1].deltas[name].dense()
        assert torch.allclose(delta.dense(), expected, atol=1e-5)


def test_a_sum_turns_dense_where_factors_no_longer_pay() -> None:
    thin = LowRank(torch.randn(3, 40), torch.randn(3, 40))
    assert isinstance(add(thin, thin), LowRank)
    thick = LowRank(torch.randn(12, 40), torch.randn(12, 40))
    assert isinstance(add(thick, thick), Dense)
    assert torch.allclose(add(thick, thick).dense(), 2 * thick.dense())
    assert isinstance(add(thin, Dense(torch.zeros(40, 40))), Dense)


def test_norm_needs_no_dense_matrix_and_equals_it() -> None:
    low = LowRank(torch.randn(5, 30), torch.randn(5, 20))
    assert torch.allclose(low.norm().float(), low.dense().norm(), rtol=1e-5)
    assert torch.allclose(Dense(low.dense()).norm().float(), low.dense().norm(), rtol=1e-5)


def test_dense_patches_run_beside_factored_ones(bert: TaskModel, patches: list[Patch]) -> None:
    """Baselines make dense changes; in one forward with others each row still sees its own."""
    dense = Patch(
        {n: Dense(d.dense()) for n, d in patches[1].deltas.items()}, bert.fingerprint, "finetune", patches[1].edits
    )
    mixed = [patches[0], dense, patches[2]]
    assert bert.predict_patched(mixed, QUESTIONS) == bert.predict_patched(patches, QUESTIONS)


def test_a_patch_may_leave_weights_alone(bert: TaskModel, patches: list[Patch]) -> None:
    name = next(iter(patches[0].deltas))
    only = Patch({name: patches[0].deltas[name]}, bert.fingerprint, "hyper", patches[0].edits)
    stacked = stack_patches([only, patches[1]], bert.layers)
    other = next(n for n in stacked if n != name)
    assert not stacked[other].dense()[0].any()
    assert torch.allclose(stacked[name].dense()[0], only.deltas[name].dense())


def test_revert_of_a_patch_that_is_not_on_the_model(bert: TaskModel, patches: list[Patch]) -> None:
    with pytest.raises(MismatchError, match="not applied to the model"):
        patches[0].revert(bert)


def test_a_patch_that_is_on_twice_comes_off_once(bert: TaskModel, patches: list[Patch]) -> None:
    patches[0].apply(bert)
    once = weights_of(bert)
    with patches[0].applied(bert):
        assert len(bert.patches) == 2
    assert_untouched(bert, once)


def test_patches_are_equal_by_content(bert: TaskModel, patches: list[Patch], tmp_path: Path) -> None:
    """A patch that was loaded twice is one patch: the second copy reverts the first."""
    before = weights_of(bert)
    patches[0].save(tmp_path / "p.safetensors")
    Patch.load(tmp_path / "p.safetensors").apply(bert)
    Patch.load(tmp_path / "p.safetensors").revert(bert)
    assert_untouched(bert, before)
    assert Patch.load(tmp_path / "p.safetensors") == patches[0] != patches[1]
    assert len({Patch.load(tmp_path / "p.safetensors"), *patches}) == 3
    assert patches[0] != "a patch"


def test_a_patch_is_shown_on_one_short_line(patches: list[Patch]) -> None:
    both = patches[0] + patches[1]
    assert repr(both) == (
        f"Patch(2 edits, first {QUESTIONS[0]!r}, rank {both.rank}, {both.nbytes:,} bytes, base {both.base[:12]})"
    )


@pytest.mark.parametrize("move", [{"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_originals_follow_a_model_that_is_moved(bert: TaskModel, patches: list[Patch], move: dict[str, Any]) -> None:
    expected = {name: weight.to(**move) for name, weight in weights_of(bert).items()}
    patches[0].apply(bert)
    bert.model.to(**move)
    patches[1].apply(bert)
    assert all(original.device == bert.device for original in bert.originals.values())
    patches[0].revert(bert)
    patches[1].revert(bert)
    assert not bert.originals
    if "dtype" in move:
        assert_untouched(bert, expected)


# Bad input


def test_each_input_needs_its_own_patch(bert: TaskModel, patches: list[Patch]) -> None:
    with pytest.raises(InputError, match="3 patches and 2 inputs"):
        bert.predict_patched(patches, QUESTIONS[:2])
    with pytest.raises(MismatchError, match="made for weights"):
        tiny.build("bert", seed=7).predict_patched(patches, QUESTIONS)


@pytest.mark.parametrize(
    "tensors",
    [{"w:A": torch.zeros(2, 3)}, {"w": torch.zeros(2)}, {"w:delta": torch.tensor([[float("nan")]])}],
    ids=["half a factor", "no part", "not finite"],
)
def test_files_that_hold_no_change_of_a_weight(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A right checksum over wrong content."""
    metadata = {"format": "factpatch-patch-1", "base": "b", "method": "m", "edits": "[]"}
    metadata["checksum"] = checksum(metadata, tensors)
    save_file(tensors, tmp_path / "p.safetensors", metadata=metadata)
    with pytest.raises(FileError, match="does not hold a complete patch"):
        Patch.load(tmp_path / "p.safetensors")


def test_a_patch_for_other_weights_is_refused(bert: TaskModel, patches: list[Patch]) -> None:
    other = tiny.build("bert", seed=7)
    before = weights_of(other)
    with pytest.raises(MismatchError, match="made for weights"):
        patches[0].apply(other)
    assert_untouched(other, before)
    other_patch = Patch(patches[0].deltas, other.fingerprint, "hyper", patches[0].edits)
    with pytest.raises(MismatchError, match="different weights"):
        _ = patches[0] + other_patch


def test_a_patch_of_the_wrong_shape_is_refused(bert: TaskModel, patches: list[Patch]) -> None:
    before = weights_of(bert)
    name = next(iter(bert.layers))
    wrong = Patch({name: Dense(torch.zeros(3, 3))}, bert.fingerprint, "hyper", patches[0].edits)
    with pytest.raises(MismatchError, match="shape"):
        wrong.apply(bert)
    assert_untouched(bert, before)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "foreign", "changed edit"])
def test_damaged_files_are_refused(patches: list[Patch], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "p.safetensors"
    patches[0].save(path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-5] ^= 1
    elif damage == "empty":
        content = bytearray()
    elif damage == "text":
        content = bytearray(b"not a patch at all")
    if damage == "foreign":
        save_file({"w": torch.zeros(2)}, path)
    elif damage == "changed edit":
        with safe_open(path, framework="pt") as file:
            metadata = {**file.metadata(), "edits": "[]"}
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
        save_file(tensors, path, metadata=metadata)
    else:
        path.write_bytes(content)
    with pytest.raises(FileError, match=str(path)):
        Patch.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no patch file"):
        Patch.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_failed_save_keeps_the_old_file(
    patches: list[Patch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = tmp_path / "p.safetensors"
    patches[0].save(path)
    old = path.read_bytes()

    def full_disk(tensors: object, scratch: Path, metadata: object) -> None:
        scratch.write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(FileError, match="No space left"):
        patches[1].save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
