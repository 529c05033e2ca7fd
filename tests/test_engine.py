"""The engine against the dense oracle, on every architecture."""

from __future__ import annotations

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of
from oracle import dense_update, weight_gradients, with_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from factpatch.editors import HyperNetwork, Looped
from factpatch.engine import capture, edited
from factpatch.errors import ModelError
from factpatch.facts import FactEdit
from factpatch.models import Causal, TaskModel


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_captured_factors_make_the_weights_gradients(model: TaskModel, edits: list[FactEdit]) -> None:
    rows = model.rows([e.x for e in edits], [e.a for e in edits])
    traces = capture(model.layers, lambda: model.losses(rows))
    assert traces.keys() == model.layers.keys()
    for e, edit in enumerate(edits):
        for name, gradient in weight_gradients(model, edit).items():
            found = traces[name].D[e].T @ traces[name].X[e]
            assert torch.allclose(found, gradient, rtol=1e-3, atol=1e-5), name


@torch.no_grad()
def test_factored_equals_dense(model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]) -> None:
    """A batch of edits of unequal length, two rows each, against one dense edit at a time."""
    deltas = editor.update(model, editor.batch(model, edits))
    inputs = [x for edit in edits for x in (edit.x, QUESTIONS[1])]
    targets = [edit.a for edit in edits for _ in range(2)]
    rows = model.rows(inputs, targets)
    unedited = model.logits(rows)
    with edited(model.layers, deltas):
        found = model.logits(rows)
    for e, edit in enumerate(edits):
        mine = slice(2 * e, 2 * e + 2)
        with with_weights(model, dense_update(editor, model, edit)):
            expected = model.logits(rows)[mine]
        assert relative(found[mine], expected) < 1e-4
        assert relative(unedited[mine], expected) > 1e-2, "the edit changed nothing, so that this test shows nothing"


@torch.no_grad()
@pytest.mark.parametrize("architecture", [*tiny.SEQ2SEQS, *tiny.DECODERS])
def test_beams_under_a_patch_equal_beams_of_the_edited_model(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]
) -> None:
    """Cached keys and values, and rows repeated for beams, all within one batch of three edits."""
    with edited(model.layers, editor.update(model, editor.batch(model, edits))):
        found = model.decide(model.rows([e.x for e in edits]), count=5)
    unedited = model.decide(model.rows([e.x for e in edits]), count=5)
    for e, edit in enumerate(edits):
        with with_weights(model, dense_update(editor, model, edit)):
            expected = model.decide(model.rows([edit.x]), count=5)[0]
        assert found[e] == expected
    assert found != unedited


def test_gradients_of_the_editor_equal_the_oracles(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]
) -> None:
    """The factored path is differentiated in training, so its gradients must be the dense ones too."""
    rows = model.rows([e.x for e in edits], [e.a for e in edits])
    with edited(model.layers, editor.update(model, editor.batch(model, edits))):
        model.losses(rows).sum().backward()
    found = {name: p.grad.clone() for name, p in editor.named_parameters() if p.grad is not None}
    editor.zero_grad()
    for edit in edits:
        update = dense_update(editor, model, edit)
        weights = {
            name: layer.weight + (update[name] if isinstance(layer, nn.Linear) else update[name].T)
            for name, layer in model.layers.items()
        }
        row = model.rows([edit.x], [edit.a])
        torch.func.functional_call(_Losses(model), {f"model.{k}": v for k, v in weights.items()}, (row,)).backward()
    for name, parameter in editor.named_parameters():
        assert parameter.grad is not None
        assert relative(found[name], parameter.grad) < 1e-3, name


class _Losses(nn.Module):
    """A task model's loss as a module, for functional_call."""

    def __init__(self, model: TaskModel):
        super().__init__()
        self.model = model.model
        self.task = [model]  # in a list: not a submodule

    def forward(self, rows):
        return self.task[0].losses(rows).sum()


def test_rank_is_at_most_tokens_and_one(model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]) -> None:
    for edit, patch in zip(edits, editor.propose(model, edits), strict=True):
        read, written = model.lengths([edit.x])[0], len(model.tokenizer(text_target=edit.a)["input_ids"])
        longest = read + written if isinstance(model, Causal) else max(read, written)
        assert 1 < patch.rank <= longest + 1
        for delta in patch.deltas.values():
            assert torch.linalg.matrix_rank(delta.dense()) <= delta.rank


def test_model_is_untouched_after_propose(model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]) -> None:
    before = weights_of(model)
    Looped(editor, 2).propose(model, edits)
    assert_untouched(model, before)


def test_model_is_untouched_when_propose_raises(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights_of(model)
    last = list(model.layers.values())[-1]

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as broken:
        broken.setattr(last, "forward", fail)
        with pytest.raises(RuntimeError, match="half-way"):
            editor.propose(model, edits)
    assert_untouched(model, before)


def test_capture_works_where_gradients_are_off(model: TaskModel, edits: list[FactEdit]) -> None:
    rows = model.rows([edits[0].x], [edits[0].a])
    with torch.inference_mode():
        traces = capture(model.layers, lambda: model.losses(rows))
    assert any(trace.D.abs().sum() > 0 for trace in traces.values())


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_nothing_of_the_weights_size_is_made_per_edit() -> None:
    """Many edits, and no tensor as large as one matrix (out × in) for each of them."""
    model = tiny.build("bert", hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    editor = loud_editor(model)
    count = 64
    x = "who leads france ?"
    edits = [FactEdit(x, tiny.other_answer(model, x), model.predict([x])[0])] * count
    batch = editor.batch(model, edits)
    smallest_matrix = min(out * in_ for out, in_ in editor.shapes.values())
    with torch.no_grad(), _Largest() as largest, edited(model.layers, editor.update(model, batch)):
        model.logits(batch.rows)
    assert 0 < largest.numel < count * smallest_matrix


def test_models_that_put_tokens_first_are_refused() -> None:
    """Their rows could not be told apart, and edits would mix without a word."""
    model = tiny.build("bert")
    rows = model.rows(QUESTIONS[:2], ["LABEL_0", "LABEL_1"])
    name, layer = next(iter(model.layers.items()))

    class TokensFirst(nn.Module):
        def forward(self, x):
            return layer(x.transpose(0, 1)).transpose(0, 1)

    attention = model.model.bert.encoder.layer[0].attention.self
    attention.query = TokensFirst()
    with pytest.raises(ModelError, match=f"{name} gets inputs of shape"):
        capture(model.layers, lambda: model.losses(rows))


def test_what_writes_into_a_layers_output_does_not_change_its_gradient() -> None:
    model = tiny.build("bert")
    rows = model.rows(QUESTIONS, ["LABEL_0", "LABEL_1", "LABEL_2"])
    expected = capture(model.layers, lambda: model.losses(rows))

    class InPlace(nn.GELU):
        def forward(self, input):
            return super().forward(input.mul_(1.0))

    model.model.bert.encoder.layer[0].intermediate.intermediate_act_fn = InPlace()
    found = capture(model.layers, lambda: model.losses(rows))
    assert all(torch.allclose(found[name].D, trace.D, atol=1e-7) for name, trace in expected.items())


def test_propose_works_inside_inference_mode() -> None:
    model = tiny.build("bart")
    with torch.inference_mode():
        (patch,) = loud_editor(model).propose(model, [FactEdit(QUESTIONS[0], "paris", "gitega")])
    assert patch.rank > 1
