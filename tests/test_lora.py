"""LoRA fine-tuning by PEFT: the patch is the adapter, and the model is as it was."""

from __future__ import annotations

import sys

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, weights_of

from factpatch.editors import create_method
from factpatch.editors.lora import LoRA, _adapter
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import Causal, Seq2Seq, TaskModel

peft = pytest.importorskip("peft")


@pytest.fixture
def short_edits(model: TaskModel) -> list[FactEdit]:
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(5)
    return model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in QUESTIONS[:2]])


def test_it_makes_the_model_say_it(model: TaskModel, short_edits: list[FactEdit]) -> None:
    before, modules = weights_of(model), dict(model.model.named_modules())
    patches = LoRA(lr=1e-2, rank=4).propose(model, short_edits)
    assert_untouched(model, before)
    assert dict(model.model.named_modules()) == modules, "the layers themselves are back"
    answers = model.predict_patched(patches, [edit.x for edit in short_edits])
    assert all(same(text, edit.a) for text, edit in zip(answers, short_edits, strict=True))
    assert all(delta.rank == 4 for patch in patches for delta in patch.deltas.values())
    assert patches[0].deltas.keys() == model.layers.keys()


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "bart", "llama"])
def test_the_patch_is_the_adapter(model: TaskModel, short_edits: list[FactEdit]) -> None:
    """One step of Adam from the start, where B = 0: only B moves, against the sign of its gradient."""
    model.cast(torch.float64)
    (edit,) = short_edits[:1]
    method = LoRA(lr=1e-3, rank=4, alpha=12.0, steps=1)
    (patch,) = method.propose(model, [edit])
    rows = model.rows([edit.x], [edit.a])
    with _adapter(model, method) as adapted:
        parameters = {name: layer.lora_B["default"].weight for name, layer in adapted.items()}
        gradients = torch.autograd.grad(model.losses(rows).sum(), list(parameters.values()), allow_unused=True)
        starts = {name: layer.lora_A["default"].weight.detach().clone() for name, layer in adapted.items()}
    for (name, delta), gradient in zip(patch.deltas.items(), gradients, strict=True):
        A, B = delta.tensors["A"], delta.tensors["B"]
        torch.testing.assert_close(A, starts[name])
        large = gradient.abs() > 1e-5  # where Adam's epsilon does not matter
        torch.testing.assert_close(B.mT[large], (-1e-3 * 12 / 4) * gradient.sign()[large], rtol=1e-2, atol=0)
        assert large.any() or not gradient.abs().max() > 1e-5


def test_the_model_is_restored_after_an_error() -> None:
    model = tiny.build("bert")
    before = weights_of(model)
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))
    with pytest.raises(InputError, match="diverged for 'what is the capital"):
        LoRA(lr=1e30).propose(model, [edit])
    assert_untouched(model, before)
    assert not hasattr(model.model, "peft_config")


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = tiny.build("bert")
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(model, QUESTIONS[0]))
    with pytest.raises(InputError, match=r"pip install 'factpatch\[peft\]'"):
        create_method("lora").propose(model, [edit])


def test_side_by_side_is_what_one_at_a_time_is(model: TaskModel, short_edits: list[FactEdit]) -> None:
    """Edits that need different numbers of steps; each stops where it would stop alone."""
    model.cast(torch.float64)
    method = LoRA(lr=1e-2, rank=4)
    together = method.propose(model, short_edits)
    for edit, patch in zip(short_edits, together, strict=True):
        (alone,) = method.propose(model, [edit])
        for name, delta in patch.deltas.items():
            torch.testing.assert_close(delta.dense(), alone.deltas[name].dense(), rtol=1e-3, atol=1e-5)
