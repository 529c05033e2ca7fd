"""The objective of a step against the dense oracle, and the table that its batches come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from conftest import loud_editor
from oracle import dense_update
from samples import revisions
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.data.revisions import Revision
from factpatch.editors import HyperNetwork
from factpatch.errors import InputError
from factpatch.facts import FactEdit, normalize
from factpatch.models import Rows, TaskModel
from factpatch.training import TrainConfig
from factpatch.training.objective import Objective, doubts, unedited_outputs
from factpatch.training.table import Plan, RevisionTable

CONFIG = TrainConfig(edits=3, rows=5, label_smoothing=0.1, constraint="both", max_tokens=36)


class _Logits(nn.Module):
    """A task model's logits as a module, for functional_call: (places, classes)."""

    def __init__(self, model: TaskModel):
        super().__init__()
        self.model = model.model
        self.task = [model]  # in a list: not a submodule

    def forward(self, rows: Rows) -> Tensor:
        logits = self.task[0].logits(rows)
        return logits.flatten(0, -2)


def logits_under(model: TaskModel, update: dict[str, Tensor], text: str, target: str) -> tuple[Tensor, Tensor]:
    """Of one text alone, so of no padding; and the target's labels."""
    weights = {}
    for name, delta in update.items():
        layer = model.layers[name]
        weight_name = next(n for n, p in model.model.named_parameters() if p is layer.weight)
        weights[f"model.{weight_name}"] = layer.weight + (delta if isinstance(layer, nn.Linear) else delta.T)
    rows = model.rows([text], [target])
    assert rows.labels is not None
    return torch.func.functional_call(_Logits(model), weights, (rows,)), rows.labels.flatten()


def written_out(
    table: RevisionTable, plan: Plan, known: list[Revision]
) -> list[tuple[FactEdit, list[str], list[Revision]]]:
    """A plan in words: each edit, the texts it shall change, the revisions that shall stay."""
    texts = {number: text for text, number in _numbers(table, known).items()}
    found = []
    for i, number in enumerate(plan.revisions):
        revision = known[number]
        edit = FactEdit(revision.input, revision.alternatives[plan.alternatives[i]], revision.prediction)
        found.append(
            (edit, [revision.input, *(texts[n] for n in plan.paraphrases[i])], [known[n] for n in plan.others[i]])
        )
    return found


def _numbers(table: RevisionTable, known: list[Revision]) -> dict[str, int]:
    """How the table numbers its texts: inputs first, then paraphrases, as they turn up."""
    numbers: dict[str, int] = {}
    for revision in known:
        numbers.setdefault(revision.input, len(numbers))
    for revision in known:
        for text in revision.rephrases:
            numbers.setdefault(text, len(numbers))
    return numbers


@pytest.fixture
def known(model: TaskModel) -> list[Revision]:
    return revisions(model, 20)


def test_loss_and_gradients_equal_the_oracles(model: TaskModel, editor: HyperNetwork, known: list[Revision]) -> None:
    table = RevisionTable(model, loud_editor(model), known, CONFIG)
    plan = table.plan(0)
    measured = Objective(model, CONFIG, unedited_outputs(model, table))(editor, table.batch(plan, CONFIG.edits))
    losses, kls, sizes = [], [], []
    for edit, edit_texts, others in written_out(table, plan, known):
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
        table = RevisionTable(model, loud_editor(model), known, config)
        objective = Objective(model, config, unedited_outputs(model, table))
        batch = table.batch(table.plan(3), config.edits)
        kept = objective(editor, batch).constraints
        assert objective.unedited is not None
        objective.unedited = None
        torch.testing.assert_close(objective(editor, batch).constraints, kept, rtol=1e-4, atol=1e-6)
        assert kept.item() != 0


@pytest.mark.parametrize("over", ["top1", "beam"])
def test_doubts_are_what_predictions_lack_to_certainty(model: TaskModel, known: list[Revision], over: str) -> None:
    table = RevisionTable(model, loud_editor(model), known, replace(CONFIG, kl_over=over, rows=13))
    expected = []
    for number in table.pool:
        logits, labels = logits_under(model, {}, known[number].input, known[number].prediction)
        expected.append(1 - logits.softmax(-1).gather(1, labels[:, None]).min().item())
    for unedited in (None, unedited_outputs(model, table)):
        assert doubts(model, table, unedited) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
def test_kl_over_the_beam(name: str) -> None:
    """Σ p(c) log p(c)/p'(c) over what the beam found, each candidate a whole answer."""
    model = tiny.build(name)
    editor, known = loud_editor(model), revisions(model, 12)
    config = replace(CONFIG, kl_over="beam", rows=13, constraint="kl")
    table = RevisionTable(model, loud_editor(model), known, config)
    plan = table.plan(0)
    ours = Objective(model, config, unedited_outputs(model, table))(
        editor, table.batch(plan, config.edits)
    ).constraints.item()
    sums = []
    for edit, _, others in written_out(table, plan, known):
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
    table = RevisionTable(model, loud_editor(model), known, once)
    batch = table.batch(table.plan(0), once.edits)
    first = editor.update(model, batch.fact)
    second = editor.update(model, batch.fact, under=first)
    found = Objective(model, twice, unedited_outputs(model, table))._update(editor, batch)
    for name, delta in found.items():
        torch.testing.assert_close(delta.dense(), first[name].dense() + second[name].dense(), rtol=1e-4, atol=1e-5)
    measured = Objective(model, twice, unedited_outputs(model, table))(editor, batch)
    assert measured.loss.item() != pytest.approx(
        Objective(model, once, unedited_outputs(model, table))(editor, batch).loss.item()
    )
    measured.loss.backward()
    assert all(p.grad is None for p in model.model.parameters())


# The table


@pytest.fixture(scope="module")
def bert() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture(scope="module")
def bert_revisions(bert: TaskModel) -> list[Revision]:
    return revisions(bert, 30)


def test_plans_repeat_and_epochs_see_every_revision_once(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    config = TrainConfig(edits=4, rows=6)
    first, second = (RevisionTable(bert, loud_editor(bert), bert_revisions, config) for _ in range(2))
    seen = []
    for step in range(15):
        one, other = first.plan(step), second.plan(step)
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
        seen += one.revisions.tolist()
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))
    assert seen[:30] != seen[30:60]
    assert not np.array_equal(
        RevisionTable(bert, loud_editor(bert), bert_revisions, replace(config, seed=1)).plan(0).others,
        first.plan(0).others,
    )


def test_others_are_drawn_in_proportion_to_their_doubts(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    table = RevisionTable(bert, loud_editor(bert), bert_revisions, TrainConfig(edits=30, rows=22))
    weights = np.linspace(0, 1, len(table.pool))
    table.prefer(weights)
    drawn = np.concatenate([table.plan(step).others.ravel() for step in range(50)])
    shares = np.bincount(drawn, minlength=30)[table.pool] / len(drawn)
    # 30,000 draws: a share's standard error is 0.0014 at most; the edited ones' neighbours stand in for them.
    assert shares == pytest.approx(weights / weights.sum(), abs=0.008)
    again = RevisionTable(bert, loud_editor(bert), bert_revisions, TrainConfig(edits=30, rows=22))
    again.prefer(7 * weights)
    assert np.array_equal(again.plan(3).others, table.plan(3).others)


def test_inputs_equal_to_the_edited_one_are_no_others(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    """Also where two records differ in punctuation and case only."""
    twins = [replace(r, id=f"{r.id}'", input=f"{r.input.upper()} ?!") for r in bert_revisions[:2]]
    few = [*bert_revisions[:2], *twins]
    table = RevisionTable(bert, loud_editor(bert), few, TrainConfig(edits=4, rows=30))
    for step in range(5):
        plan = table.plan(step)
        for number, others in zip(plan.revisions, plan.others, strict=True):
            assert all(normalize(few[n].input) != normalize(few[number].input) for n in others)


def test_a_revision_without_paraphrases_learns_from_its_input(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    bare = [replace(r, rephrases=()) for r in bert_revisions]
    table = RevisionTable(bert, loud_editor(bert), bare, TrainConfig(edits=4, rows=6, paraphrase_rows=2))
    plan = table.plan(0)
    assert np.array_equal(plan.paraphrases, np.repeat(table.inputs[plan.revisions][:, None], 2, 1))


@pytest.mark.parametrize(("which", "start"), [("generated", "the "), ("human", "a ")])
def test_which_paraphrases(bert: TaskModel, bert_revisions: list[Revision], which: str, start: str) -> None:
    table = RevisionTable(bert, loud_editor(bert), bert_revisions, TrainConfig(edits=30, rows=6, paraphrases=which))
    shown = set()
    for step in range(10):
        plan = table.plan(step)
        shown |= set(plan.paraphrases.ravel().tolist())
    expected = {"generated": "rephrases", "human": "human_rephrases"}[which]
    allowed = {text for r in bert_revisions for text in (r.input, *getattr(r, expected))}
    ids = table.texts.columns["input_ids"].tolist()
    decoded = set(bert.tokenizer.batch_decode(ids, skip_special_tokens=True))
    assert decoded == allowed
    assert any(text.startswith(start) for text in decoded)


def test_weights_are_means(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    """Over tokens, rows and edits; the parts of a step add up to the whole."""
    config = TrainConfig(edits=5, rows=7)
    table = RevisionTable(bert, loud_editor(bert), bert_revisions, config)
    plan = table.plan(0)
    parts = [table.batch(plan.part(i, 2), total=5) for i in range(2)]
    for name in ("edit", "keep"):
        assert sum(float(getattr(part, name).weights.sum()) for part in parts) == pytest.approx(1.0)


def test_revisions_that_cannot_be_trained_on(bert: TaskModel, bert_revisions: list[Revision]) -> None:
    with pytest.raises(InputError, match="with alternatives"):
        RevisionTable(bert, loud_editor(bert), [replace(r, alternatives=()) for r in bert_revisions], TrainConfig())
    with pytest.raises(InputError, match="two different inputs"):
        RevisionTable(bert, loud_editor(bert), bert_revisions[:1] * 3, TrainConfig())
    with pytest.raises(InputError, match="no label"):
        RevisionTable(
            bert,
            loud_editor(bert),
            [replace(bert_revisions[0], prediction="maybe"), *bert_revisions[1:]],
            TrainConfig(),
        )
