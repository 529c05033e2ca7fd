"""The objective of a step against the dense oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from conftest import loud_editor
from oracle import dense_update
from samples import revisions
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.data.revisions import Revision, teachable
from factpatch.editors import HyperNetwork
from factpatch.facts import FactEdit
from factpatch.models import Rows, TaskModel
from factpatch.training import TrainConfig
from factpatch.training.batcher import Batcher
from factpatch.training.objective import Objective
from factpatch.training.sampler import Plan, Sampler, training_paraphrases
from factpatch.training.unedited import uncertainties, unedited_outputs

CONFIG = TrainConfig(edits=3, rows=5, label_smoothing=0.1, constraint="both", max_tokens=36)


class _Logits(nn.Module):
    """A task model's logits as a module, for functional_call: (positions, classes)."""

    def __init__(self, model: TaskModel):
        super().__init__()
        self.model = model.model
        self.task = [model]  # in a list: not a submodule

    def forward(self, rows: Rows) -> Tensor:
        logits = self.task[0].logits(rows)
        return logits.flatten(0, -2)


def logits_under(model: TaskModel, update: dict[str, Tensor], text: str, target: str) -> tuple[Tensor, Tensor]:
    """The logits of one text alone, so without padding, and the labels of its target."""
    weights = {}
    for name, delta in update.items():
        layer = model.layers[name]
        weight_name = next(n for n, p in model.model.named_parameters() if p is layer.weight)
        weights[f"model.{weight_name}"] = layer.weight + (delta if isinstance(layer, nn.Linear) else delta.T)
    rows = model.rows([text], [target])
    assert rows.labels is not None
    return torch.func.functional_call(_Logits(model), weights, (rows,)), rows.labels.flatten()


def written_out(
    plan: Plan, known: list[Revision], config: TrainConfig
) -> list[tuple[FactEdit, list[str], list[Revision]]]:
    """A plan in words: each edit, the texts that are to get its answer, and its control inputs."""
    found = []
    for i, number in enumerate(plan.edited):
        revision = known[number]
        edit = FactEdit(revision.input, revision.alternatives[plan.targets[i]], revision.prediction)
        paraphrases = training_paraphrases(revision, config)
        texts = [revision.input, *(paraphrases[n] if n >= 0 else revision.input for n in plan.paraphrases[i])]
        found.append((edit, texts, [known[n] for n in plan.controls[i]]))
    return found


def prepared(model: TaskModel, known: list[Revision], config: TrainConfig) -> tuple[Sampler, Batcher]:
    """A sampler, and a batcher whose rows run in two groups."""
    known = teachable(model, known)
    sampler, batcher = Sampler(known, config), Batcher(model, loud_editor(model), known, config)
    sampler.sort_pool(batcher.control_lengths(sampler.pool))
    (columns,) = batcher.column_groups
    batcher.column_groups = [columns[2:], columns[:2]]
    return sampler, batcher


def objective_of(model: TaskModel, config: TrainConfig, sampler: Sampler, batcher: Batcher) -> Objective:
    return Objective(model, config, unedited_outputs(model, batcher, sampler.pool))


_known: dict[str, list[Revision]] = {}


@pytest.fixture
def known(architecture: str, model: TaskModel) -> list[Revision]:
    """Revisions that can be taught, found once: all models of an architecture are alike, and asking them is slow."""
    if architecture not in _known:  # random decoders give alternatives that are too long to teach
        _known[architecture] = teachable(model, revisions(model, 20))
    return list(_known[architecture])


def test_loss_and_gradients_equal_the_oracles(model: TaskModel, editor: HyperNetwork, known: list[Revision]) -> None:
    sampler, batcher = prepared(model, known, CONFIG)
    plan = sampler.plan(0)
    measured = objective_of(model, CONFIG, sampler, batcher)(editor, batcher.batch(plan, CONFIG.edits))
    losses, kls, sizes = [], [], []
    for edit, edit_texts, others in written_out(plan, known, CONFIG):
        update = dense_update(editor, model, edit)
        sizes.append(torch.stack([delta.square().mean().sqrt() for delta in update.values()]).mean())
        for text in edit_texts:
            logits, labels = logits_under(model, update, text, edit.a)
            losses.append(F.cross_entropy(logits, labels, label_smoothing=0.1))
        for other in others:
            after, _ = logits_under(model, update, other.input, other.prediction)
            before, _ = logits_under(model, {}, other.input, other.prediction)
            log_p, log_q = before.log_softmax(-1), after.log_softmax(-1)
            kls.append(F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean())
    assert (len(losses), len(kls)) == (3 * 2, 3 * 3)
    expected = [torch.stack(values).mean() for values in (losses, kls, sizes)]
    torch.testing.assert_close(
        torch.stack([measured.loss, *measured.constraints]), torch.stack(expected), rtol=1e-3, atol=1e-5
    )

    parameters = list(editor.parameters())
    ours = torch.autograd.grad(
        measured.loss + 1.7 * measured.constraints[0] + 0.3 * measured.constraints[1], parameters
    )
    theirs = torch.autograd.grad(expected[0] + 1.7 * expected[1] + 0.3 * expected[2], parameters)
    largest = max(gradient.abs().max().item() for gradient in theirs)
    assert largest > 1e-4
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=2e-3, atol=2e-4 * largest)


def test_unedited_outputs_are_the_same_kept_or_computed_anew(
    model: TaskModel, editor: HyperNetwork, known: list[Revision]
) -> None:
    for over in ("top1", "beam"):
        config = replace(CONFIG, kl_over=over, rows=13, constraint="kl")
        sampler, batcher = prepared(model, known, config)
        objective = objective_of(model, config, sampler, batcher)
        batch = batcher.batch(sampler.plan(3), config.edits)
        kept = objective(editor, batch).constraints
        assert objective.unedited is not None
        objective.unedited = None
        torch.testing.assert_close(objective(editor, batch).constraints, kept, rtol=1e-4, atol=1e-6)
        assert kept.item() != 0


@pytest.mark.parametrize("over", ["top1", "beam"])
def test_uncertainties_are_what_predictions_lack_to_certainty(
    model: TaskModel, known: list[Revision], over: str
) -> None:
    sampler, batcher = prepared(model, known, replace(CONFIG, kl_over=over, rows=13))
    expected = []
    for number in sampler.pool:
        logits, labels = logits_under(model, {}, known[number].input, known[number].prediction)
        expected.append(1 - logits.softmax(-1).gather(1, labels[:, None]).min().item())
    for unedited in (None, unedited_outputs(model, batcher, sampler.pool)):
        assert uncertainties(model, batcher, sampler.pool, unedited) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
def test_kl_over_the_beam(name: str) -> None:
    """It is Σ p(c) log p(c)/p'(c) over the candidates of the beam, each a whole answer."""
    model = tiny.build(name)
    editor, known = loud_editor(model), revisions(model, 12)
    config = replace(CONFIG, kl_over="beam", rows=13, constraint="kl")
    sampler, batcher = prepared(model, known, config)
    plan = sampler.plan(0)
    objective = objective_of(model, config, sampler, batcher)
    ours = objective(editor, batcher.batch(plan, config.edits)).constraints.item()
    sums = []
    for edit, _, others in written_out(plan, known, config):
        update = dense_update(editor, model, edit)
        assert len(others) == 2
        for other in others:
            total = 0.0
            for candidate in (other.prediction, *other.alternatives)[:5]:
                log_p, log_q = (
                    -F.cross_entropy(*logits_under(model, change, other.input, candidate), reduction="sum")
                    for change in ({}, update)
                )
                total += (log_p.exp() * (log_p - log_q)).item()
            sums.append(total)
    assert ours == pytest.approx(sum(sums) / len(sums), rel=1e-3, abs=1e-5)


def test_a_second_update_is_computed_on_the_first(
    model: TaskModel, editor: HyperNetwork, known: list[Revision]
) -> None:
    once, twice = (replace(CONFIG, updates=n) for n in (1, 2))
    sampler, batcher = prepared(model, known, once)
    batch = batcher.batch(sampler.plan(0), once.edits)
    first = editor.update(model, batch.edit_batch)
    second = editor.update(model, batch.edit_batch, under=first)
    found = objective_of(model, twice, sampler, batcher).update(editor, batch.edit_batch)
    for name, delta in found.items():
        torch.testing.assert_close(delta.dense(), first[name].dense() + second[name].dense(), rtol=1e-4, atol=1e-5)
    measured = objective_of(model, twice, sampler, batcher)(editor, batch)
    of_one = objective_of(model, once, sampler, batcher)(editor, batch)
    assert measured.loss.item() != pytest.approx(of_one.loss.item())
    measured.loss.backward()
    assert all(p.grad is None for p in model.model.parameters())
