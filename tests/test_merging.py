"""Merging patches: the closed form against a plain reference, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of
from samples import texts
from torch import Tensor

from factpatch.covariance import FLOOR, Covariance
from factpatch.deltas import Delta, Dense, LowRank
from factpatch.engine import edited
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit
from factpatch.merging import MERGED, MODES, Mode, merge, scaled_patch, smallest_part
from factpatch.models import Causal, Classifier, Seq2Seq, TaskModel
from factpatch.patch import Patch, stack_patches, weight_shape

OTHERS = texts(40, seed=5)


def random_patch(
    model: TaskModel, edits: Sequence[FactEdit], seed: int, dense: bool = False, scale: float = 0.02
) -> Patch:
    """A patch of random factors, or of random dense changes, in every weight but the first few."""
    rng = torch.Generator().manual_seed(seed)
    deltas: dict[str, Delta] = {}
    for name, layer in list(model.layers.items())[seed % 3 :]:
        out, in_ = weight_shape(layer)
        if dense:
            deltas[name] = Dense(scale * torch.randn(out, in_, generator=rng))
        else:
            deltas[name] = LowRank(torch.randn(3, in_, generator=rng), scale * torch.randn(3, out, generator=rng))
    return Patch(deltas, model.fingerprint, "random", tuple(edits))


def double(delta: Delta) -> Tensor:
    return delta.B.double().mT @ delta.A.double() if isinstance(delta, LowRank) else delta.delta.double()


def layer_inputs(model: TaskModel, edit: FactEdit, patch: Patch | None) -> dict[str, Tensor]:
    """What every layer reads for one edit alone, (tokens, in), under its patch."""
    found: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: found.__setitem__(name, args[0].flatten(0, -2)))
        for name, layer in model.layers.items()
    ]
    targets = None if model.kind == "classifier" else [edit.a]
    rows = model.rows([edit.x], targets)
    with torch.no_grad(), edited(model.layers, stack_patches([patch], model.layers) if patch else {}):
        model.losses(rows) if targets else model.logits(rows)
    for handle in handles:
        handle.remove()
    return found


def reference(model: TaskModel, patches: Sequence[Patch], others: Sequence[str], ridge: float) -> dict[str, Tensor]:
    """Vᵀ K (KᵀK + λ N C)⁻¹ with dense matrices and one text at a time."""
    edits = [(patch, edit) for patch in patches for edit in patch.edits]
    per_edit = [(patch, layer_inputs(model, edit, None)) for patch, edit in edits]
    answers = model.predict(list(others))
    sample = [layer_inputs(model, FactEdit(x, a), None) for x, a in zip(others, answers, strict=True)]
    found: dict[str, Tensor] = {}
    for name, layer in model.layers.items():
        if not any(name in patch.deltas for patch in patches):
            continue
        zero = torch.zeros(weight_shape(layer), dtype=torch.float64)
        K = torch.cat([inputs[name] for _, inputs in per_edit])
        V = torch.cat(
            [
                inputs[name] @ (double(patch.deltas[name]) if name in patch.deltas else zero).mT
                for patch, inputs in per_edit
            ]
        )
        k = torch.cat([inputs[name] for inputs in sample])
        C = k.mT @ k / len(k)
        C += FLOOR * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)
        M = K.mT @ K + ridge * len(edits) * C
        found[name] = V.mT @ K @ torch.linalg.inv(M)
    return found


def edits_for(model: TaskModel, count: int) -> list[FactEdit]:
    questions = [*QUESTIONS, *texts(20, seed=6)][:count]
    return [FactEdit(x, tiny.other_answer(model, x)) for x in questions]


@pytest.mark.parametrize("count", [1, 12])
def test_a_merged_patch_is_the_closed_form(architecture: str, count: int) -> None:
    """Few edits give factors and many a dense matrix; both equal the plain formula."""
    model = tiny.build(architecture).cast(torch.float64)
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(6)
    edits = edits_for(model, count + 1)
    patches = [random_patch(model, [edit], seed, dense=seed == 1) for seed, edit in enumerate(edits[:-2])]
    patches.append(random_patch(model, edits[-2:], 9))  # one patch of two edits
    before = weights_of(model)
    merged = merge(model, patches, OTHERS, ridge=0.1)
    assert_untouched(model, before)
    expected = reference(model, patches, OTHERS, 0.1)
    assert merged.deltas.keys() == expected.keys()
    for name, delta in merged.deltas.items():
        difference = (double(delta) - expected[name]).norm() / expected[name].norm()
        assert difference < 1e-8, name
    kinds = {type(delta) for delta in merged.deltas.values()}
    assert (LowRank if count == 1 else Dense) in kinds
    assert merged.edits == tuple(sorted(edits, key=lambda edit: (edit.x, edit.a)))
    assert merged.method == "random" + MERGED


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_patches_changes_no_bit(mode: Mode) -> None:
    model = tiny.build("bart")
    patches = [random_patch(model, [edit], seed) for seed, edit in enumerate(edits_for(model, 6))]
    patches.append(random_patch(model, patches[0].edits, 7))  # a second patch of one edit
    one = merge(model, patches, OTHERS, mode=mode)
    other = merge(model, patches[::-1], OTHERS[::-1], mode=mode)
    assert one.edits == other.edits
    for name, delta in one.deltas.items():
        for part, tensor in delta.tensors.items():
            assert torch.equal(tensor, other.deltas[name].tensors[part])


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_in_sequence_the_merged_model_computes_what_the_patched_one_does(name: str) -> None:
    """Of one edit and with hardly any ridge, every layer's output is met."""
    model = tiny.build(name).cast(torch.float64)
    (edit,) = edits_for(model, 1)
    patch = random_patch(model, [edit], 0, scale=0.1)
    merged = merge(model, [patch], OTHERS, ridge=1e-9, mode="sequence")
    before, wanted, found = (layer_inputs(model, edit, p) for p in (None, patch, merged))
    for weight, expected in wanted.items():
        moved = (expected - before[weight]).norm()
        assert (found[weight] - expected).norm() <= 1e-4 * moved + 1e-9, weight


def test_dropping_a_patch_is_never_having_had_it() -> None:
    model = tiny.build("bert")
    covariance = Covariance.compute(model, OTHERS)
    patches = [random_patch(model, [edit], seed) for seed, edit in enumerate(edits_for(model, 5))]
    merge(model, patches, covariance=covariance).apply(model)
    again = merge(model, patches[:4], covariance=covariance)  # patches that are on the model do not matter
    assert len(model.patches) == 1
    model.patches[0].revert(model)
    expected = merge(model, patches[:4], covariance=covariance)
    assert all(torch.equal(again.deltas[n].dense(), expected.deltas[n].dense()) for n in expected.deltas)


def test_a_ridge_by_weight_applies_to_that_weight() -> None:
    model = tiny.build("bert")
    covariance = Covariance.compute(model, OTHERS)
    patches = [random_patch(model, [edit], 3) for edit in edits_for(model, 3)]
    names = list(model.layers)
    plain = merge(model, patches, covariance=covariance)
    mixed = merge(model, patches, covariance=covariance, ridge={names[1]: 5.0})
    changed = [name for name in names if not torch.equal(plain.deltas[name].dense(), mixed.deltas[name].dense())]
    assert changed == [names[1]]
    for ridge in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="ridge above 0"):
            merge(model, patches, covariance=covariance, ridge=ridge)
    with pytest.raises(InputError, match="not an editable weight"):
        merge(model, patches, covariance=covariance, ridge={"nothing": 1.0})


def test_contradictions_are_refused_before_any_work() -> None:
    model = tiny.build("bert")
    x, y = "who leads france ?", "Who leads  FRANCE"
    patches = [random_patch(model, [FactEdit(x, "LABEL_0")], 0), random_patch(model, [FactEdit(y, "LABEL_1")], 1)]
    with pytest.raises(InputError, match=r"each other: 'who leads france \?' to 'LABEL_0' and 'Who leads  FR"):
        merge(model, patches, [])
    with pytest.raises(InputError, match="found none"):
        merge(model, [], OTHERS)
    with pytest.raises(InputError, match="found no usable text"):
        merge(model, patches[:1], ["", "  "])
    with pytest.raises(InputError, match="expected a mode"):
        merge(model, patches[:1], OTHERS, mode="sum")  # type: ignore[arg-type]


def test_a_covariance_file_comes_back_and_other_weights_are_refused(tmp_path: Path) -> None:
    model, other = tiny.build("marian"), tiny.build("marian", seed=1)
    covariance = Covariance.compute(model, OTHERS)
    covariance.save(tmp_path / "c.safetensors")
    loaded = Covariance.load(tmp_path / "c.safetensors")
    assert (loaded.base, loaded.sample, loaded.count) == (model.fingerprint, covariance.sample, len(OTHERS))
    assert list(loaded.readers.items()) == list(covariance.readers.items())
    patches = [random_patch(model, [edit], 0) for edit in edits_for(model, 2)]
    one, again = (merge(model, patches, covariance=c) for c in (covariance, loaded))
    assert all(torch.equal(one.deltas[n].dense(), again.deltas[n].dense()) for n in one.deltas)

    with pytest.raises(MismatchError, match="covariance was computed for weights"):
        merge(other, [random_patch(other, [edit], 0) for edit in edits_for(other, 2)], covariance=loaded)
    with pytest.raises(MismatchError, match="patch was made for weights"):
        merge(other, patches, OTHERS)
    with pytest.raises(FileError, match="no covariance file"):
        Covariance.load(tmp_path / "none")
    (tmp_path / "bad").write_bytes((tmp_path / "c.safetensors").read_bytes()[:-9])
    with pytest.raises(FileError, match="not a readable covariance"):
        Covariance.load(tmp_path / "bad")
    patches[0].save(tmp_path / "patch")
    with pytest.raises(FileError, match="expected format factpatch-covariance-1, found factpatch-patch-1"):
        Covariance.load(tmp_path / "patch")


def test_layers_that_read_one_input_share_its_moments() -> None:
    readers = Covariance.compute(tiny.build("bart"), OTHERS[:2]).readers
    cross = [name for name in readers if "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name]
    assert len({readers[name] for name in cross}) == 1, "all of them read the encoder's output"
    assert len(set(readers.values())) < len(readers) / 1.5


def test_the_smallest_part_still_succeeds_and_is_no_larger() -> None:
    model = tiny.build("bert")
    assert isinstance(model, Classifier)
    asked = model.resolve(edits_for(model, 6))
    patches = loud_editor(model).propose(model, asked)
    whole = model.predict_patched(patches, [edit.x for edit in asked])
    # Some are to say what their patch makes them say; the last fails.
    edits = [*(replace(edit, a=answer) for edit, answer in zip(asked[:5], whole, strict=False)), asked[5]]
    edits[5] = replace(edits[5], a=next(label for label in model.labels if label != whole[5]))
    patches = [replace(patch, edits=(edit,)) for patch, edit in zip(patches, edits, strict=True)]
    parts = smallest_part(model, patches)
    after = model.predict_patched(parts, [edit.x for edit in edits])
    for edit, answer, part_answer, patch, part in zip(edits, whole, after, patches, parts, strict=True):
        assert part.norm() <= patch.norm() * (1 + 1e-6)
        if answer == edit.a:
            assert part_answer == edit.a
        else:
            assert part is patch
    assert any(part.norm() < 0.9 * patch.norm() for patch, part in zip(patches, parts, strict=True))
    assert scaled_patch(patches[0], 0.5).norm() == pytest.approx(0.5 * patches[0].norm())
