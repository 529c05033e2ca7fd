"""The baselines: they stop at the target, stay within bounds, and edit many facts at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from conftest import assert_untouched, weights_of

from factpatch.editors import FineTune, GradientStep, Zhu
from factpatch.editors import finetune as module
from factpatch.errors import InputError
from factpatch.facts import FactEdit, same
from factpatch.models import Causal, Seq2Seq, TaskModel
from factpatch.models.layers import block_names
from factpatch.patch import Patch


@pytest.fixture
def short_edits(model: TaskModel) -> list[FactEdit]:
    """Three edits of unequal length, to short targets."""
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(5)
    questions = ["what is the capital of burundi ?", "who leads france ?", "where do people speak rundi in africa ?"]
    return model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in questions])


def test_fine_tuning_makes_the_model_say_it(model: TaskModel, short_edits: list[FactEdit]) -> None:
    before = weights_of(model)
    patches = FineTune(lr=1e-3).propose(model, short_edits)
    assert_untouched(model, before)
    answers = model.predict_patched(patches, [edit.x for edit in short_edits])
    assert all(same(text, edit.a) for text, edit in zip(answers, short_edits, strict=True))
    assert {patch.method for patch in patches} == {"finetune"}


def test_side_by_side_is_what_one_at_a_time_is(
    model: TaskModel, short_edits: list[FactEdit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edits that need different numbers of steps; each stops where it would stop alone."""
    # In double precision: RMSprop turns gradients that are float32's rounding noise into steps of full size.
    model.cast(torch.float64)
    method = Zhu(lr=1e-3, bound=5e-3, steps=60)  # edits that succeed need up to 51
    together = method.propose(model, short_edits)
    monkeypatch.setattr(module, "MAX_EDITS_PER_BATCH", 1)
    alone = method.propose(model, short_edits)
    for one, other in zip(together, alone, strict=True):
        for name, delta in one.deltas.items():
            torch.testing.assert_close(delta.dense(), other.deltas[name].dense(), rtol=1e-3, atol=1e-5)


def test_one_step_is_rmsprops(architecture: str) -> None:
    """Against torch's own RMSprop on the weights themselves."""
    model = tiny.build(architecture)
    if isinstance(model, Seq2Seq):
        model.limit_answers(5)
    x = "who leads france ?"
    (edit,) = model.resolve([FactEdit(x, tiny.other_answer(model, x))])
    (patch,) = FineTune(steps=1).propose(model.cast(torch.float64), [edit])
    reference = tiny.build(architecture).cast(torch.float64)
    weights = [layer.weight.requires_grad_(True) for layer in reference.layers.values()]
    starts = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.RMSprop(weights, lr=1e-5)
    reference.losses(reference.rows([edit.x], [edit.a])).sum().backward()
    optimizer.step()
    for (name, delta), weight, start in zip(patch.deltas.items(), weights, starts, strict=True):
        moved = (weight - start).detach()
        expected = moved if isinstance(model.layers[name], torch.nn.Linear) else moved.T
        torch.testing.assert_close(delta.dense(), expected.float(), rtol=1e-3, atol=1e-8)


def test_a_step_limit() -> None:
    model = tiny.build("bert")
    x = "who leads france ?"
    (edit,) = model.resolve([FactEdit(x, tiny.other_answer(model, x))])
    (patch,) = FineTune(lr=1e-12, steps=3).propose(model, [edit])
    assert max(float(delta.dense().abs().max()) for delta in patch.deltas.values()) < 1e-10


@pytest.mark.parametrize("bound", [1e-3, 1e-4])
def test_zhu_stays_within_its_bound(bound: float) -> None:
    model = tiny.build("bert")
    x = "who leads france ?"
    (edit,) = model.resolve([FactEdit(x, tiny.other_answer(model, x))])
    (patch,) = Zhu(lr=1e-2, bound=bound, steps=5).propose(model, [edit])
    assert patch.method == "zhu"
    largest = max(float(delta.dense().abs().max()) for delta in patch.deltas.values())
    assert largest == pytest.approx(bound)


def test_one_block_only(model: TaskModel, short_edits: list[FactEdit]) -> None:
    blocks = block_names(model.layers)
    stacks = 2 if isinstance(model, Seq2Seq) else 1
    assert len(blocks) == 2 * stacks, blocks
    (patch, *_) = FineTune(layers=blocks[0], lr=1e-3, steps=2).propose(model, short_edits)
    assert patch.deltas
    assert all(name.startswith(f"{blocks[0]}.") for name in patch.deltas)
    with pytest.raises(InputError, match=f"choose all, mlp, a pattern, or a block: {blocks[0]}"):
        FineTune(layers="layer.99").propose(model, short_edits)


def test_a_gradient_step_goes_downhill(model: TaskModel, short_edits: list[FactEdit]) -> None:
    before = weights_of(model)
    patches = GradientStep(lr=1e-3).propose(model, short_edits)
    assert_untouched(model, before)
    for edit, patch in zip(short_edits, patches, strict=True):
        rows = model.rows([edit.x], [edit.a])
        with torch.no_grad():
            start = model.losses(rows).item()
            with patch.applied(model):
                assert model.losses(rows).item() < start


def test_a_gradient_step_keeps_no_padding(model: TaskModel, short_edits: list[FactEdit]) -> None:
    """Each edit's patch has the ranks that it has alone, whatever the longest edit of its batch."""
    method = GradientStep()
    for edit, together in zip(short_edits, method.propose(model, short_edits), strict=True):
        (alone,) = method.propose(model, [edit])
        assert {n: d.rank for n, d in together.deltas.items()} == {n: d.rank for n, d in alone.deltas.items()}
        tokens = model.lengths([edit.x])[0] + model.lengths([edit.a])[0]
        assert together.rank <= tokens


def test_a_gradient_step_without_a_gradient_somewhere_is_a_patch(tmp_path: Path) -> None:
    """A decoder's first token attends to itself alone, so that its queries and keys have no gradient."""
    model = tiny.build("bart")
    model.limit_answers(5)
    (patch,) = GradientStep(lr=1.0).propose(model, [FactEdit("who leads france ?", "paris")])
    patch.save(tmp_path / "p.safetensors")
    loaded = Patch.load(tmp_path / "p.safetensors")
    answer = model.predict_patched([patch], ["who leads france ?"])
    with loaded.applied(model):
        assert model.predict(["who leads france ?"]) == answer


def test_weights_that_are_not_finite_are_an_error() -> None:
    bert = tiny.build("bert")
    edit = FactEdit("who leads france ?", tiny.other_answer(bert, "who leads france ?"))
    with pytest.raises(InputError, match="diverged for 'who leads france"):
        FineTune(lr=1e38).propose(bert, [edit])
