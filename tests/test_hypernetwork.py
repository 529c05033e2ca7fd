"""The hyper-network: its sizes, its loop, its folder."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from conftest import QUESTIONS, loud_editor
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForSequenceClassification

from factpatch.deltas import Delta, LowRank, scaled
from factpatch.editors import EditorConfig, GradientStep, HyperNetwork, Looped, load_editor
from factpatch.editors.hypernetwork import first_of_last_blocks
from factpatch.editors.looped import PARTS, add_best_part, losses_under
from factpatch.errors import FileError, InputError, MismatchError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel, editable_layers, load_model
from factpatch.patch import Patch, weight_shape

_halves = {
    f"{s}_{k}": n
    for s in ("encoder", "decoder")
    for k, n in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))
}


@pytest.mark.parametrize(
    ("build", "weights", "values", "size"),
    [
        (lambda: BertForSequenceClassification(BertConfig()), 72, 84.9, 53.78),
        (lambda: BartForConditionalGeneration(BartConfig(d_model=768, **_halves)), 96, 99.1, 66.52),
    ],
    ids=["bert-base", "bart-base"],
)
def test_sizes_are_the_papers(build, weights: int, values: float, size: float) -> None:
    with torch.device("meta"):
        shapes = {name: weight_shape(layer) for name, layer in editable_layers(build()).items()}
        editor = HyperNetwork(shapes, torch.empty(100, 768), "none", EditorConfig())
    assert len(shapes) == weights
    assert round(sum(out * in_ for out, in_ in shapes.values()) / 1e6, 1) == values
    trained = sum(parameter.numel() for parameter in editor.parameters())
    assert round((trained - editor.fact_encoder.embedding.weight.numel()) / 1e6, 2) == size


@pytest.fixture
def bart() -> TaskModel:
    return tiny.build("bart")


def test_editing_a_batch_equals_editing_one_by_one(
    model: TaskModel, editor: HyperNetwork, edits: list[FactEdit]
) -> None:
    """Also where a fact's text is padded: the LSTM must not read padding in either direction."""
    together = editor.propose(model, edits)
    for edit, patch in zip(edits, together, strict=True):
        (alone,) = editor.propose(model, [edit])
        assert patch.edits == (edit,)
        for name, delta in patch.deltas.items():
            assert torch.allclose(delta.dense(), alone.deltas[name].dense(), rtol=1e-3, atol=1e-5)


def test_reading_the_models_hidden_states(model: TaskModel, edits: list[FactEdit], tmp_path: Path) -> None:
    """They do not matter at first, and padding never does."""
    config = EditorConfig(width=64, bottleneck=16, lstm=8, states=True)
    torch.manual_seed(0)
    editor = HyperNetwork.for_model(model, config)
    layer = editor.fact_encoder.states
    assert layer is not None
    assert not layer.weight.any()
    before = editor.propose(model, edits)
    torch.nn.init.normal_(layer.weight)
    after = editor.propose(model, edits)
    name = editor.read[0]
    assert not torch.allclose(before[0].deltas[name].dense(), after[0].deltas[name].dense(), rtol=1e-2)
    for edit, patch in zip(edits, after, strict=True):
        (alone,) = editor.propose(model, [edit])
        for name, delta in patch.deltas.items():
            wanted = alone.deltas[name].dense()
            torch.testing.assert_close(delta.dense(), wanted, rtol=1e-2, atol=1e-3 * float(wanted.norm()))
    editor.save(tmp_path / "editor")
    loaded = load_editor(tmp_path / "editor").propose(model, edits)[0]
    assert all(torch.equal(delta.dense(), after[0].deltas[name].dense()) for name, delta in loaded.deltas.items())


def test_the_last_blocks_of_each_stack() -> None:
    names = list(tiny.build("bart").layers)
    last = [f"model.{stack}.layers.1.self_attn.k_proj.weight" for stack in ("encoder", "decoder")]
    assert first_of_last_blocks(names) == last
    assert first_of_last_blocks(["h.9.a", "h.9.b", "h.10.a", "h.10.mlp.0.b"]) == ["h.10.a"]


def test_batches_of_propose_keep_the_order(bart: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factpatch.editors.trainable.EDITS_PER_BATCH", 2)
    edits = [FactEdit(x, "paris", "gitega") for x in (QUESTIONS[2], QUESTIONS[0], QUESTIONS[1])]
    patches = loud_editor(bart).propose(bart, edits)
    assert [patch.edits[0].x for patch in patches] == [edit.x for edit in edits]


def test_training_the_editor_does_not_move_the_models_embeddings(bart: TaskModel) -> None:
    editor = HyperNetwork.for_model(bart, EditorConfig(width=8, bottleneck=4, lstm=4))
    assert editor.fact_encoder.embedding.weight.data_ptr() != bart.word_embeddings.data_ptr()
    assert torch.equal(editor.fact_encoder.embedding.weight, bart.word_embeddings)


def test_without_gradients_the_update_has_rank_one(bart: TaskModel) -> None:
    editor = HyperNetwork.for_model(bart, EditorConfig(width=8, bottleneck=4, lstm=4, gradients=False))
    (patch,) = editor.propose(bart, [FactEdit(QUESTIONS[0], "paris")])
    assert patch.rank == 1


def test_text_that_looks_like_the_separators_is_just_text(bart: TaskModel) -> None:
    (patch,) = loud_editor(bart).propose(bart, [FactEdit("what is || the >> capital ?", "paris")])
    assert patch.edits[0].x == "what is || the >> capital ?"


class _Stepwise(HyperNetwork):
    """An editor that moves a classifier's scores a little with every update: gradient steps, as factors."""

    def forward(self, condition, traces) -> dict[str, Delta]:
        return {name: LowRank(trace.X, -0.002 * trace.D) for name, trace in traces.items()}


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "bart"])
def test_loop_updates_until_the_target_is_said(model: TaskModel, edits: list[FactEdit]) -> None:
    shapes = {name: weight_shape(layer) for name, layer in model.layers.items()}
    editor = _Stepwise(shapes, model.word_embeddings, model.fingerprint, EditorConfig(width=8, bottleneck=4, lstm=4))
    texts = [edit.x for edit in edits]
    wanted = [edit.a for edit in edits]
    once = model.predict_patched(editor.propose(model, edits), texts)
    looped = Looped(editor, 60).propose(model, edits)
    assert once != wanted, "one update must not be enough, or this test shows nothing"
    assert model.predict_patched(looped, texts) == wanted
    assert all(isinstance(patch, Patch) and patch.edits == (edit,) for patch, edit in zip(looped, edits, strict=True))


@pytest.mark.parametrize("architecture", ["bert", "bart"])
def test_of_a_repeated_update_the_best_part_is_taken(model: TaskModel, edits: list[FactEdit]) -> None:
    (edit,) = model.resolve(edits[:1])
    rows = model.rows([edit.x], [edit.a])

    def loss(patch: Patch) -> float:
        with patch.applied(model), torch.no_grad():
            return float(model.losses(rows))

    (patch,) = GradientStep(lr=1e-3).propose(model, [edit])
    best = set()
    for lr in (0.01, -0.01):  # down, and up the hill, where the smallest part does the least harm
        (update,) = GradientStep(lr=lr).propose(model, [edit])
        (grown,) = add_best_part(model, [edit], [patch], [update])
        tried = [replace(update, deltas={n: scaled(d, part) for n, d in update.deltas.items()}) for part in PARTS]
        losses = [loss(patch + one) for one in tried]
        assert loss(grown) == pytest.approx(min(losses), rel=1e-4)
        best.add(losses.index(min(losses)))
    assert len(best) == 2


def test_loop_leaves_edits_alone_that_took_at_once(bart: TaskModel) -> None:
    editor = loud_editor(bart)
    edit = FactEdit(QUESTIONS[0], "paris")
    (once,) = editor.propose(bart, [edit])
    reached = FactEdit(edit.x, "paris", "gitega")
    (again,) = _always_right(editor, bart, reached)
    assert again.rank == once.rank


def test_a_sure_loop_updates_edits_until_they_are_likely() -> None:
    model, editor = load_model("world", "cpu"), load_editor("world")
    asked = {"What is the capital of Kenya?": "Brounex Dai", "What is the capital of Peru?": "Klu"}
    edits = [FactEdit(x, a) for x, a in asked.items()]
    plain, sure = (Looped(editor, sure=most).propose(model, edits) for most in (math.inf, 1e-3))
    rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
    with torch.no_grad():
        assert (losses_under(model, rows, sure) < losses_under(model, rows, plain)).all()
    assert Looped(editor, sure=1e-3).describe(model)["sure"] == 1e-3
    assert "sure" not in Looped(editor).describe(model)


def _always_right(editor: HyperNetwork, model: TaskModel, edit: FactEdit) -> list[Patch]:
    said = model.predict_patched
    try:
        model.predict_patched = lambda patches, inputs: [edit.a for _ in inputs]  # type: ignore[method-assign] (a stand-in)
        return Looped(editor, 5).propose(model, [edit])
    finally:
        model.predict_patched = said  # type: ignore[method-assign] (and back)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_editor_joins_its_model_on_the_gpu() -> None:
    model, editor = load_model("world", "cuda"), load_editor("world")
    (patch,) = editor.propose(model, [FactEdit("What is the capital of Burundi?", "Gitega")])
    with patch.applied(model):
        assert model.predict(["What is the capital of Burundi?"]) == ["Gitega"]


def test_save_then_load(bart: TaskModel, tmp_path: Path) -> None:
    editor = loud_editor(bart)
    editor.save(tmp_path / "editor")
    loaded = load_editor(tmp_path / "editor")
    assert loaded.config == editor.config
    assert loaded.shapes == editor.shapes
    edits = [FactEdit(x, "paris", "gitega") for x in QUESTIONS]
    for a, b in zip(editor.propose(bart, edits), loaded.propose(bart, edits), strict=True):
        assert all(torch.equal(delta.dense(), b.deltas[name].dense()) for name, delta in a.deltas.items())
    assert {file.name for file in (tmp_path / "editor").iterdir()} == {"config.json", "editor.safetensors"}


# Bad input


def test_an_editor_for_another_model_is_refused(bart: TaskModel) -> None:
    with pytest.raises(MismatchError, match="trained for weights"):
        loud_editor(tiny.build("bart", seed=5)).propose(bart, [FactEdit(QUESTIONS[0], "paris")])


def test_no_editor_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"not an editor's folder|no readable editor"):
        load_editor(tmp_path)


def test_a_damaged_editor(bart: TaskModel, tmp_path: Path) -> None:
    loud_editor(bart).save(tmp_path / "e")
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    config["editor"]["width"] += 1
    (tmp_path / "e" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match=r"not an editor's folder|no readable editor"):
        load_editor(tmp_path / "e")


def test_wrong_sizes_and_loops(bart: TaskModel) -> None:
    with pytest.raises(InputError, match="width=0, lstm=-1"):
        EditorConfig(width=0, lstm=-1)
    with pytest.raises(InputError, match="at least one update"):
        Looped(loud_editor(bart), 0)


def test_an_update_that_is_not_finite_is_refused(bart: TaskModel) -> None:
    editor = loud_editor(bart)
    with torch.no_grad():
        editor.fact_encoder.out.bias.fill_(float("nan"))
    with pytest.raises(InputError, match="not finite"):
        editor.propose(bart, [FactEdit(QUESTIONS[0], "paris")])


def test_an_editor_on_its_models_device_is_not_moved(bart: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM that is moved gets new memory, and a recorded step knows it by its old."""
    editor = loud_editor(bart)

    def moved(*_: object) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr(editor, "to", moved)
    assert editor.propose(bart, [FactEdit(QUESTIONS[0], "paris")])


def test_wide_word_embeddings_are_reduced(tmp_path: Path) -> None:
    """A decoder's vocabulary is large; the directions of largest variance keep the differences between its words."""
    model = tiny.build("llama")
    editor = HyperNetwork.for_model(model, EditorConfig(width=16, bottleneck=4, lstm=4, embedding=31))
    found = editor.fact_encoder.embedding.weight
    assert found.shape == (len(tiny.VOCABULARY), 31)
    distances = torch.cdist(model.word_embeddings, model.word_embeddings)
    assert torch.allclose(torch.cdist(found, found), distances, rtol=0.1, atol=0.01)
    editor.save(tmp_path / "editor")
    loaded = load_editor(tmp_path / "editor")
    assert isinstance(loaded, HyperNetwork)
    assert torch.equal(loaded.fact_encoder.embedding.weight, found)
