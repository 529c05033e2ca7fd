"""Metrics on hand-made cases, and many edits at once compared with one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import loud_editor
from samples import revisions

from factpatch.data.revisions import Neighbour, Revision, edit_of, editable
from factpatch.deltas import LowRank, scaled
from factpatch.editors import GradientStep, HyperNetwork
from factpatch.errors import InputError
from factpatch.evaluation import measure, predicted_now
from factpatch.evaluation.measure import Examiner
from factpatch.evaluation.outcomes import ControlInputs, outcome
from factpatch.facts import FactEdit
from factpatch.metrics import Outcome, intervals, summary, value_names, wilson
from factpatch.models import Causal, Seq2Seq, TaskModel
from factpatch.models.base import TOKENS_PER_BATCH
from factpatch.models.text import NEAR_TIE

X = Revision(
    "1",
    "Is Paris in France?",
    "yes",
    ("no",),
    ("Does France have Paris?", "is paris in france"),
    ("Paris: French?",),
    (),
)
OTHERS = [
    Revision("2", "Is Rome in Italy?", "yes", ("no",), (), (), ("yes",)),
    Revision("3", "Is Rome in France?", "yes", ("no",), (), (), ("no",)),
    Revision("4", "Is Bonn in Japan?", "no", ("yes",), (), (), ()),
    Revision("5", "IS PARIS IN FRANCE", "yes", ("no",), (), (), ("yes",)),
]


def answers(x: str, *rephrased: str) -> dict[str, str]:
    return dict(zip([X.input, *X.rephrases, *X.human_rephrases], [x, *rephrased], strict=True))


def values(*given: float | None) -> Outcome:
    """An outcome from its values in the order of the table; the rest are missing."""
    names = value_names()
    return Outcome(dict(zip(names, [*given, *[None] * (len(names) - len(given))], strict=True)))


def test_a_good_edit() -> None:
    """One of two other inputs with gold answers is wrong before; nothing changes."""
    found = outcome(X, "no", answers("No.", "no", "no", "no"), ControlInputs(OTHERS), ["yes", "yes", "no", "no"])
    assert found == values(True, 1.0, 1.0, 1.0, 0.5, 0.5)


def test_a_failed_edit_whose_paraphrases_agree_has_no_equivalence() -> None:
    found = outcome(X, "no", answers("yes", "yes", "yes", "yes"), ControlInputs(OTHERS), ["yes", "yes", "no", "yes"])
    assert (found.success, found.values["equivalence"], found.values["equivalence_human"]) == (False, 0.0, 0.0)


def test_x_itself_never_counts() -> None:
    """Neither among the paraphrases nor among the others, however it is spelled."""
    found = outcome(X, "no", answers("no", "yes", "no", "yes"), ControlInputs(OTHERS), ["yes", "no", "yes", "no"])
    assert found.values["equivalence"] == 0.0, "the second paraphrase is x"
    assert found.values["retain"] == pytest.approx(1 / 3), "the fourth input is x"
    assert (found.values["accuracy_before"], found.values["accuracy_after"]) == (0.5, 1.0)


def test_nothing_to_look_at() -> None:
    bare = replace(X, rephrases=(X.input.lower(),), human_rephrases=())
    found = outcome(bare, "no", {X.input: "no", X.input.lower(): "no"}, ControlInputs(OTHERS[3:]), ["yes"])
    assert found == values(True)
    assert {key: value for key, value in summary([found]).items() if "kl" not in key} == {
        "success": 1.0,
        "retain": None,
        "equivalence": None,
        "equivalence_human": None,
        "deterioration": None,
        "retain_neighbours": None,
        "forced_success": None,
        "forced_equivalence": None,
    }


def test_known_paraphrases_are_no_control_inputs() -> None:
    """A paraphrase of x that is a record of its own should change with x, and must not count against retain."""
    own = [replace(OTHERS[0], input=text) for text in ("Does France have Paris", "paris french")]
    found = outcome(X, "no", answers("no", "no", "no", "no"), ControlInputs([*own, OTHERS[1]]), ["no", "no", "yes"])
    assert found.values["retain"] == 1.0
    assert (found.values["accuracy_before"], found.values["accuracy_after"]) == (0.0, 0.0)


def test_edits_made_together_are_no_control_inputs_of_each_other() -> None:
    found = outcome(
        X, "no", answers("no", "no", "no", "no"), ControlInputs(OTHERS), ["no", "yes", "no", "no"], together=OTHERS[:1]
    )
    assert found.values["retain"] == 1.0


def test_neighbours_keep_their_answers() -> None:
    """A neighbour that is one of the edited inputs, or a paraphrase of one, does not count."""
    texts = {"Is Lyon in France?": "yes", "Is Nice in Spain?": "no", "does france have paris": "yes", "Is Rome?": "no"}
    x = replace(X, neighbours=tuple(Neighbour(text, said) for text, said in texts.items()))
    said = answers("no", "no", "no", "no") | texts | {"Is Nice in Spain?": "yes", "does france have paris": "no"}
    alone = outcome(x, "no", said, ControlInputs(OTHERS), ["yes", "yes", "no", "no"])
    assert alone.values["retain_neighbours"] == pytest.approx(2 / 3)
    together = replace(OTHERS[0], input="is rome")
    joint = outcome(x, "no", said, ControlInputs(OTHERS), ["yes", "yes", "no", "no"], together=[x, together])
    assert joint.values["retain_neighbours"] == pytest.approx(1 / 2)


def test_forced_accuracy_is_kept_apart_from_generated_answers() -> None:
    """x itself counts as x and not as its own paraphrase."""
    forced = {X.input: 0.5, X.rephrases[0]: 0.25, X.rephrases[1]: 1.0, X.human_rephrases[0]: 0.75}
    found = outcome(X, "no", answers("no", "no", "no", "no"), ControlInputs(OTHERS), ["yes"] * 4, forced=forced)
    assert (found.values["forced_success"], found.values["forced_equivalence"]) == (0.5, 0.5)


def test_kl_counts_flipped_predictions() -> None:
    """Flipping the inputs that moved most must not lower the mean."""
    controls, moved = ControlInputs(OTHERS[:3]), np.array([0.1, 0.2, 3.0], np.float32)
    kept = outcome(X, "no", answers("no", "no", "no", "no"), controls, ["yes", "yes", "no"], moved)
    flipped = outcome(X, "no", answers("no", "no", "no", "no"), controls, ["yes", "yes", "yes"], moved)
    for found in (kept, flipped):
        assert found.values["kl_mean"] == pytest.approx(1.1)
        assert found.values["kl_worst"] == pytest.approx(3.0)


def test_an_interval_at_the_edge_has_a_width() -> None:
    found = intervals([values(True, 1.0, 1.0)] * 30)
    for key in ("success", "retain", "equivalence"):
        assert found[key] == pytest.approx((0.8865, 1.0), abs=1e-3)
    assert intervals([values(False, 0.5)] * 30)["success"] == pytest.approx((0.0, 0.1135), abs=1e-3)
    assert wilson(0.5, 100) == pytest.approx((0.404, 0.596), abs=1e-3)


def test_intervals_of_groups_vary_with_the_groups() -> None:
    """Four groups of ten edits; success depends on the group alone, so that few independent values are left."""
    grouped = [values(k < 2, 0.9 if k < 2 else 0.7) for k in range(4) for _ in range(10)]
    alone, together = intervals(grouped), intervals(grouped, group_size=10)
    for key in ("success", "retain"):
        width = {name: found[key][1] - found[key][0] for name, found in (("alone", alone), ("together", together))}
        assert width["together"] > 2 * width["alone"]
    one_group = intervals(grouped, group_size=40)
    assert "success" in one_group
    assert "retain" not in one_group, "all edits of a group share it"


def test_shares_are_averaged_within_an_edit_then_over_edits() -> None:
    edits = [values(True, 1.0, 0.5, None, 0.8, 0.6), values(False, 0.5, None, 0.25, 0.8, 0.8)]
    found = summary(edits)
    assert (found["success"], found["retain"], found["equivalence"], found["equivalence_human"]) == (
        0.5,
        0.75,
        0.5,
        0.25,
    )
    assert found["deterioration"] == pytest.approx(1 - 0.7 / 0.8)


def test_many_edits_at_once_are_what_one_at_a_time_is(model: TaskModel, editor: HyperNetwork) -> None:
    """With the weights materialised, prediction by prediction."""
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(5)
    known = revisions(model, 14)
    edits = editable(model, [replace(r, rephrases=r.rephrases[: i % 3]) for i, r in enumerate(known)])[:7]
    assert len(edits) >= 3
    together = measure(editor, model, edits, known)
    for revision, found in zip(edits, together, strict=True):
        edit = FactEdit(revision.input, revision.alternatives[0], revision.prediction)
        (patch,) = editor.propose(model, [edit])
        with patch.applied(model):
            texts = [revision.input, *revision.rephrases, *revision.human_rephrases]
            own = dict(zip(texts, model.predict(texts), strict=True))
            others = model.predict([other.input for other in known])
        alone = outcome(revision, edit.a, own, ControlInputs(known), others)
        assert found == alone
    assert any((found.values["retain"] or 0) < 1 for found in together), "the edits must change something"


def test_alternatives_that_cannot_be_said_are_no_edits() -> None:
    model = tiny.build("bart")
    long = " ".join(["paris"] * 40)
    known = revisions(model, 3)
    mixed = [
        replace(known[0], alternatives=(long, "paris")),
        replace(known[1], alternatives=(long,)),
        replace(known[2], alternatives=()),
    ]
    assert [r.alternatives for r in editable(model, mixed)] == [("paris",)]
    unlike = replace(known[0], prediction="paris", alternatives=("Ouagadougou", "Paris", "lake"))
    assert [r.alternatives for r in editable(model, [unlike])] == [("lake",)], "unspellable, and said already"
    assert len(measure(loud_editor(model), model, editable(model, mixed), known)) == 1


def test_less_at_a_time_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("bert")
    known = revisions(model, 14)
    edits, editor = editable(model, known)[:4], loud_editor(model)
    whole = measure(editor, model, edits, known)
    ask, asked = Examiner._ask, []

    def short(self: Examiner, batch: Any, count: int) -> Any:
        asked.append(len(batch.indices))
        if len(batch.indices) > 7:
            raise torch.cuda.OutOfMemoryError
        return ask(self, batch, count)

    monkeypatch.setattr(Examiner, "_ask", short)
    monkeypatch.setitem(
        TOKENS_PER_BATCH, "cpu", editor.edits_per_batch(model) * 14 * max(model.lengths([r.input for r in known]))
    )
    assert measure(editor, model, edits, known) == whole
    assert max(asked) == 14
    assert asked[-1] <= 7


def test_scores_that_are_not_finite_are_an_error() -> None:
    model = tiny.build("bert")
    given = predicted_now(model, revisions(model, 6))
    edits = editable(model, given)[:2]
    changes = HyperNetwork.for_model(model).changes(model, [edit_of(revision) for revision in edits])
    name, change = next(iter(changes.items()))
    assert isinstance(change, LowRank)
    change.B[1].fill_(float("nan"))
    with pytest.raises(InputError, match=f"not finite after the edit of {edits[1].id}"):
        Examiner(model, given, 2, scores=True).examine({name: change}, edits)


@pytest.mark.parametrize("architecture", [*tiny.SEQ2SEQS, *tiny.DECODERS])
def test_forced_accuracy_is_that_of_each_edited_model(model: TaskModel) -> None:
    """Many edits with unequal numbers of paraphrases, compared with one forward pass per text."""
    assert isinstance(model, Seq2Seq | Causal)
    model.limit_answers(6)
    targets = ["gitega", "paris and rundi"]
    known = [replace(r, alternatives=(targets[i % 2],)) for i, r in enumerate(revisions(model, 5))]
    known = [replace(known[0], rephrases=(), human_rephrases=()), *known[1:]]
    method = GradientStep(lr=3e-1)
    patches = method.propose(model, [edit_of(r) for r in known])
    found = Examiner(model, known[:2], len(known), scores=True).examine(
        method.changes(model, [edit_of(r) for r in known]), known
    )
    seen = set()
    for revision, patch, examined in zip(known, patches, found, strict=True):
        target = edit_of(revision).a
        words = model.tokenizer(target, add_special_tokens=False)["input_ids"]
        shares = []
        for text in (revision.input, *revision.rephrases, *revision.human_rephrases):
            rows = model.rows([text], [target])
            with patch.applied(model), torch.no_grad():
                best = model.logits(rows)[0].argmax(-1)
            assert rows.labels is not None
            start = rows.labels[0].tolist().index(words[0])
            shares.append(best[start : start + len(words)].eq(torch.tensor(words)).float().mean().item())
        assert examined.outcome.values["forced_success"] == pytest.approx(shares[0])
        expected = pytest.approx(np.mean(shares[1:])) if shares[1:] else None
        assert examined.outcome.values["forced_equivalence"] == expected
        seen |= set(shares)
    assert len(seen) > 1, "all alike would show nothing"


def test_classifiers_have_no_forced_accuracy() -> None:
    model = tiny.build("bert")
    known = editable(model, revisions(model, 4))
    (one, *_) = Examiner(model, known, 2, scores=True).examine(
        loud_editor(model).changes(model, [edit_of(r) for r in known[:2]]), known[:2]
    )
    assert one.outcome.values["forced_success"] is one.outcome.values["forced_equivalence"] is None


def test_neighbours_are_asked_and_predicted_anew() -> None:
    model = tiny.build("bart")
    model.limit_answers(5)
    texts = ("who leads africa ?", "where is the largest lake ?")
    known = [replace(r, neighbours=tuple(Neighbour(text, "wrong") for text in texts)) for r in revisions(model, 3)]
    now = predicted_now(model, known)
    assert [one.prediction for one in now[0].neighbours] == model.predict(list(texts))
    method = loud_editor(model)
    edits = editable(model, now)
    found = measure(method, model, edits, now)
    for revision, patch, one in zip(edits, method.propose(model, [edit_of(r) for r in edits]), found, strict=True):
        with patch.applied(model):
            kept = [a == n.prediction for a, n in zip(model.predict(list(texts)), revision.neighbours, strict=True)]
        assert one.values["retain_neighbours"] == np.mean(kept)


@pytest.fixture
def small_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of tiny random models are all close to each other."""
    monkeypatch.setitem(NEAR_TIE, "cpu", 1e-4)


@pytest.mark.parametrize("name", tiny.DECODERS)
@pytest.mark.usefixtures("small_ties")
def test_answers_are_confirmed_by_one_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those of generation, which runs for the changed ones only."""
    model = tiny.build(name)
    assert isinstance(model, Causal)
    known = predicted_now(model, revisions(model, 24))
    edits = editable(model, known)[:3]
    changes = loud_editor(model).changes(model, [edit_of(revision) for revision in edits])
    greedy, rows = model._greedy, []

    def counted(inputs: dict[str, torch.Tensor], edits: int | None) -> list[list[int]]:
        rows.append(len(inputs["input_ids"]))
        return greedy(inputs, edits)

    monkeypatch.setattr(model, "_greedy", counted)
    examiner, generating = (Examiner(model, known, len(edits)) for _ in range(2))
    generating.answers = generating.targets = None
    generating._make_batches()
    counts: dict[str, list[int]] = {"confirmed": [], "generated": []}
    changed = 0
    for scale in (0.01, 0.3):
        scaled_changes = {name: scaled(change, scale) for name, change in changes.items()}
        found = {}
        for way, asked in (("confirmed", examiner), ("generated", generating)):
            rows.clear()
            found[way] = asked.examine(scaled_changes, edits)
            counts[way].append(sum(rows))
        for ours, theirs in zip(found["confirmed"], found["generated"], strict=True):
            assert ours.says_others == theirs.says_others
            assert ours.outcome == theirs.outcome
            changed += sum(answer != r.prediction for answer, r in zip(theirs.says_others, known, strict=True))
    assert changed
    assert counts["confirmed"][0] < counts["generated"][0]


@pytest.mark.parametrize("banned", [[], [[7], [9], [11]]])
@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
def test_beam_search_is_spared_for_answers_that_are_certain(
    name: str, banned: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of the search, which runs for uncertain and changed ones only."""
    model = confident(name)
    if banned:  # as Marian's padding is, so that the other tokens' probabilities sum to one
        model.generation.update(bad_words_ids=banned, renormalize_logits=True)
    known = predicted_now(model, revisions(model, 24))
    edits = editable(model, known)[:3]
    changes = loud_editor(model).changes(model, [edit_of(revision) for revision in edits])
    searched: list[int] = []
    decide = model.decide
    monkeypatch.setattr(model, "decide", lambda rows, **kw: (searched.append(len(rows)), decide(rows, **kw))[1])
    examiner, searching = (Examiner(model, known, len(edits)) for _ in range(2))
    searching.answers = searching.targets = None
    searching._make_batches()
    changed = 0
    for scale in (0.0, 0.01, 1.0):
        scaled_changes = {name: scaled(change, scale) for name, change in changes.items()}
        found = examiner.examine(scaled_changes, edits)
        confirmed, searched[:] = sum(searched), []
        reference = searching.examine(scaled_changes, edits)
        assert confirmed < sum(searched) or scale == 1
        searched.clear()
        for ours, theirs in zip(found, reference, strict=True):
            assert ours.says_others == theirs.says_others
            assert ours.outcome == theirs.outcome
            changed += sum(answer != r.prediction for answer, r in zip(theirs.says_others, known, strict=True))
    assert changed


def confident(name: str) -> Seq2Seq:
    """A tiny model with sharp predictions, which answers with the most likely sequence."""
    model = tiny.build(name)
    assert isinstance(model, Seq2Seq)
    model.fit_answers(5)
    head = model._head
    head.weight = torch.nn.Parameter(head.weight.detach() * 40, requires_grad=False)  # no longer the input embeddings
    return model


def test_answers_that_beam_search_may_not_find() -> None:
    """Another token, no end, an answer that is less likely than a deviation, and a bonus for length."""
    model = confident("bart")
    encoded = model.encode(["paris is", "what river", "euro people of"])
    found = model.answers_to_confirm(encoded)
    assert found is not None
    tokens = [ids for _, ids in found]
    assert [text for text, _ in found] == model.predict(["paris is", "what river", "euro people of"])

    def confirmed(labels: list[list[int]]) -> list[bool]:
        rows = model.collate(encoded, labels).at_targets()
        return model.still_answers(rows, model.features(rows)).tolist()

    certain = confirmed(tokens)
    assert any(certain)
    sure = certain.index(True)
    for wrong in ([tokens[sure][0], tokens[sure][1] + 1, *tokens[sure][2:]], tokens[sure][:-1]):
        labels = [wrong if i == sure else ids for i, ids in enumerate(tokens)]
        assert not confirmed(labels)[sure]
    start, model.generation.decoder_start_token_id = model.generation.decoder_start_token_id, 5
    assert not any(confirmed(tokens)), "the search begins with another token than the forward pass"
    model.generation.decoder_start_token_id = start
    model.generation.length_penalty = 1.0
    assert model.answers_to_confirm(encoded) is None


def test_answers_are_confirmed_if_the_end_token_is_given_as_a_list() -> None:
    """Hugging Face models may name their only end token in a list."""
    model = confident("bart")
    encoded = model.encode(["paris is", "what river", "euro people of"])
    found = model.answers_to_confirm(encoded)
    model.model.generation_config.eos_token_id = [model.generation.eos_token_id]
    listed = Seq2Seq(model.model, model.tokenizer)
    listed.fit_answers(5)
    assert listed.answers_to_confirm(encoded) == found
    assert found is not None
    rows = listed.collate(encoded, [ids for _, ids in found]).at_targets()
    assert listed.still_answers(rows, listed.features(rows)).any()


@pytest.mark.usefixtures("small_ties")
def test_an_answer_that_is_not_confirmed() -> None:
    """Another first token, another end, and a first token that answers may not begin with."""
    model = tiny.build("llama")
    assert isinstance(model, Causal)
    encoded = model.encode(["paris is", "what river", "euro people of"])
    tokens = [ids for _, ids in model.answers_to_confirm(encoded)]

    def confirmed(labels: list[list[int]]) -> list[bool]:
        rows = model.collate(encoded, labels).at_targets()
        return model.still_answers(rows, model.features(rows)).tolist()

    assert all(confirmed(tokens))
    first, *_, last = own = tokens[1]
    for other in ([first + 1, *own[1:]], [*own[:-1], last + 1], [model.end_tokens[0], *own]):
        assert confirmed([tokens[0], other, tokens[2]]) == [True, False, True]
