"""What a training step looks at: plans, control inputs, and the batches made from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from conftest import loud_editor
from samples import revisions

from factpatch.data.revisions import Revision, own_forms
from factpatch.errors import InputError
from factpatch.facts import normalize
from factpatch.models import TaskModel
from factpatch.training import TrainConfig
from factpatch.training.batcher import Batcher
from factpatch.training.sampler import Sampler, with_wordings


@pytest.fixture(scope="module")
def bert() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture(scope="module")
def known(bert: TaskModel) -> list[Revision]:
    return revisions(bert, 30)


# Plans


def test_plans_repeat_and_epochs_see_every_revision_once(known: list[Revision]) -> None:
    config = TrainConfig(edits=4, rows=6)
    first, second = (Sampler(known, config) for _ in range(2))
    seen = []
    for step in range(15):
        one, other = first.plan(step), second.plan(step)
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
        seen += one.edited.tolist()
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))
    assert seen[:30] != seen[30:60]
    assert not np.array_equal(Sampler(known, replace(config, seed=1)).plan(0).controls, first.plan(0).controls)


def test_control_inputs_are_drawn_in_proportion_to_their_weights(known: list[Revision]) -> None:
    config = TrainConfig(edits=30, rows=22, others=("unsure",))
    sampler, again = Sampler(known, config), Sampler(known, config)
    weights = np.linspace(0, 1, len(sampler.pool))
    sampler.weights = weights
    drawn = np.concatenate([sampler.plan(step).controls.ravel() for step in range(50)])
    shares = np.bincount(drawn, minlength=30)[sampler.pool] / len(drawn)
    # 30,000 draws: a share's standard error is at most 0.0014; the edited ones are replaced by their neighbours.
    assert shares == pytest.approx(weights / weights.sum(), abs=0.008)
    again.weights = 7 * weights
    assert np.array_equal(again.plan(3).controls, sampler.plan(3).controls)


def test_inputs_equal_to_the_edited_one_are_no_control_inputs(known: list[Revision]) -> None:
    """This includes records that differ from it only in punctuation and case."""
    twins = [replace(r, id=f"{r.id}'", input=f"{r.input.upper()} ?!") for r in known[:2]]
    few = [*known[:2], *twins]
    sampler = Sampler(few, TrainConfig(edits=4, rows=30))
    for step in range(5):
        plan = sampler.plan(step)
        for number, controls in zip(plan.edited, plan.controls, strict=True):
            assert all(normalize(few[n].input) != normalize(few[number].input) for n in controls)


def test_inputs_about_the_edited_fact_are_no_control_inputs(known: list[Revision]) -> None:
    """Records with the same subject and relation ask for the same fact, although none is a paraphrase of the other."""
    facts = [replace(r, subject=f"subject {i % 10}", relation=f"relation {i % 3 == 0}") for i, r in enumerate(known)]
    others = [replace(r, id=f"{r.id}'", input=f"{r.input} again", rephrases=(), human_rephrases=()) for r in known]
    sampler = Sampler([*facts, *others], TrainConfig(edits=30, rows=40))
    about = [(r.subject, r.relation) for r in facts] + [(None, r.id) for r in others]
    for step in range(4):
        plan = sampler.plan(step)
        for number, controls in zip(plan.edited, plan.controls, strict=True):
            assert about[number] not in [about[n] for n in controls]
    together = Sampler([*facts, *others], TrainConfig(together=30, rows=8)).plan(0).edited
    assert len({about[n] for n in together}) == len(together)


def test_what_asks_for_the_edited_fact(known: list[Revision]) -> None:
    """It is known by its text: a record that names no fact may have the input of one that does."""
    facts = [replace(r, subject="subject", relation=f"relation {i % 2}") for i, r in enumerate(known[:6])]
    unnamed = [replace(r, id=f"{r.id}'", input=f"{r.input.upper()} ?!", rephrases=()) for r in known[3:9]]
    records = [*facts, *unnamed]
    sampler = Sampler(records, TrainConfig())
    everyone = np.arange(len(records))
    found = sampler.is_own_form(everyone, np.broadcast_to(everyone, (len(records), len(records))))
    for number, record in enumerate(records):
        about = [r for r in facts if number < len(facts) and r.relation == record.relation]
        own = own_forms(record) | {normalize(r.input) for r in about}
        assert found[number].tolist() == [normalize(r.input) in own for r in records]
    assert found[1, 6], "record 6 has the input of record 3, which asks for the fact of record 1"


def test_paraphrases_of_the_edited_input_are_no_control_inputs(known: list[Revision]) -> None:
    """A paraphrase that has a record of its own asks for the edited fact itself."""
    records = [
        replace(r, id=f"{r.id}/{i}", input=f"{text.upper()}!")
        for r in known
        for i, text in enumerate((r.input, *r.rephrases, *r.human_rephrases))
    ]
    sampler = Sampler(records, TrainConfig(edits=40, rows=30))
    for step in range(20):
        plan = sampler.plan(step)
        for number, controls in zip(plan.edited, plan.controls, strict=True):
            assert not own_forms(records[number]) & {normalize(records[n].input) for n in controls}


def test_columns_of_control_inputs_have_similar_lengths(bert: TaskModel, known: list[Revision]) -> None:
    """Each input is still drawn equally often."""
    config = TrainConfig(edits=30, rows=7)
    sampler, batcher = Sampler(known, config), Batcher(bert, loud_editor(bert), known, config)
    lengths = batcher.control_lengths(np.arange(len(known)))
    assert lengths.tolist() == [length + 1 for length in bert.lengths([r.input for r in known])]
    sampler.sort_pool(batcher.control_lengths(sampler.pool))
    controls = np.concatenate([sampler.plan(step).controls for step in range(200)])
    # An edited input is replaced by the next longer one, the longest by the shortest: hence no minimum.
    short, longest = np.quantile(lengths[controls], 0.1, axis=0), lengths[controls].max(0)
    assert (longest[:-1] <= short[1:] + 1).all()
    assert longest[0] < longest[-1]
    # 30,000 draws: a share's standard error is about 0.001; edited inputs are replaced by their neighbours.
    assert np.bincount(controls.ravel()) / controls.size == pytest.approx(1 / 30, abs=0.005)


def test_a_pool_of_limited_size(known: list[Revision]) -> None:
    assert len(Sampler(known, TrainConfig()).pool) == 30
    assert len(Sampler(known, TrainConfig(control_pool=7)).pool) == 7


def test_a_fact_in_several_wordings(known: list[Revision]) -> None:
    config = TrainConfig(wordings=2)
    found = with_wordings(known, config)
    assert len(found) == len(known) + sum(bool(r.rephrases) for r in known)
    assert with_wordings(known, config) == found
    originals = {r.id: r for r in known}
    for revision in found:
        original = originals[revision.id]
        assert own_forms(revision) == own_forms(original)
        assert revision.input == original.input or original.input in revision.rephrases
        assert revision.input in (original.input, *original.rephrases)
        assert revision.prediction == original.prediction
    assert with_wordings(known, TrainConfig(wordings=1)) == known
    assert with_wordings(known, TrainConfig(wordings=9, paraphrases="none")) == known


def test_revisions_that_cannot_be_trained_on(bert: TaskModel, known: list[Revision]) -> None:
    with pytest.raises(InputError, match="with alternatives"):
        Sampler([replace(r, alternatives=()) for r in known], TrainConfig())
    with pytest.raises(InputError, match="two different inputs"):
        Sampler(known[:1] * 3, TrainConfig())
    original = next(r for r in known if r.rephrases)
    paraphrase = replace(original, input=original.rephrases[0])
    with pytest.raises(
        InputError, match=r"two different inputs .*, neither a paraphrase of the other, found one; add revisions"
    ):
        Sampler([original, paraphrase], TrainConfig())
    with pytest.raises(InputError, match="no label"):
        Batcher(bert, loud_editor(bert), [replace(known[0], prediction="maybe"), *known[1:]], TrainConfig())


# Batches


def texts_of(model: TaskModel, ids: torch.Tensor) -> list[str]:
    return model.tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_rows_of_a_batch(bert: TaskModel, known: list[Revision]) -> None:
    """The input and its paraphrase come first and get the new answer; control inputs keep their predictions."""
    config = TrainConfig(edits=3, rows=5)
    plan = Sampler(known, config).plan(0)
    batch = Batcher(bert, loud_editor(bert), known, config).batch(plan, 3)
    (rows,) = batch.row_groups
    texts = texts_of(bert, rows.inputs["input_ids"])
    for e, number in enumerate(plan.edited):
        revision, own = known[number], texts[5 * e : 5 * e + 5]
        assert own[0] == revision.input
        paraphrase = plan.paraphrases[e, 0]
        assert own[1] == (revision.rephrases[paraphrase] if paraphrase >= 0 else revision.input)
        assert own[2:] == [known[n].input for n in plan.controls[e]]
    assert rows.target_positions is not None
    assert rows.target_positions.tolist() == [0, 1, 5, 6, 10, 11, 2, 3, 4, 7, 8, 9, 12, 13, 14]
    wanted = [known[n].alternatives[a] for n, a in zip(plan.edited, plan.targets, strict=True)]
    assert batch.edit_targets.labels.tolist() == [label for label in bert.encode_targets(wanted) for _ in range(2)]
    kept = bert.encode_targets([known[n].prediction for n in plan.controls.ravel()])
    assert batch.control_targets.labels.tolist() == kept


def test_a_revision_without_paraphrases_learns_from_its_input(bert: TaskModel, known: list[Revision]) -> None:
    bare = [replace(r, rephrases=()) for r in known]
    config = TrainConfig(edits=4, rows=6, paraphrase_rows=2)
    plan = Sampler(bare, config).plan(0)
    assert (plan.paraphrases == -1).all()
    (rows,) = Batcher(bert, loud_editor(bert), bare, config).batch(plan, 4).row_groups
    texts = texts_of(bert, rows.inputs["input_ids"])
    for e, number in enumerate(plan.edited):
        assert texts[6 * e : 6 * e + 3] == [bare[number].input] * 3


@pytest.mark.parametrize(("which", "start"), [("generated", "the "), ("human", "a ")])
def test_which_paraphrases(bert: TaskModel, known: list[Revision], which: str, start: str) -> None:
    batcher = Batcher(bert, loud_editor(bert), known, TrainConfig(edits=30, rows=6, paraphrases=which))
    expected = {"generated": "rephrases", "human": "human_rephrases"}[which]
    allowed = {text for r in known for text in (r.input, *getattr(r, expected))}
    decoded = set(texts_of(bert, batcher.texts.columns["input_ids"]))
    assert decoded == allowed
    assert any(text.startswith(start) for text in decoded)


def test_weights_are_means(bert: TaskModel, known: list[Revision]) -> None:
    """They are means over tokens, rows and edits, and the parts of a step add up to the whole."""
    config = TrainConfig(edits=5, rows=7)
    plan = Sampler(known, config).plan(0)
    batcher = Batcher(bert, loud_editor(bert), known, config)
    parts = [batcher.batch(plan.part(i, 2), total=5) for i in range(2)]
    for targets in ([part.edit_targets for part in parts], [part.control_targets for part in parts]):
        assert sum(float(one.weights.sum()) for one in targets) == pytest.approx(1.0)
