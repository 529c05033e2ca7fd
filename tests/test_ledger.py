"""The ledger: facts come and go, and the merged patch is always that of the facts that are there."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import assert_untouched, weights_of
from samples import texts

from factpatch import ledger as ledger_module
from factpatch import ledger_sums
from factpatch.covariance import Covariance
from factpatch.data.revisions import Revision
from factpatch.deltas import Dense, LowRank
from factpatch.editors import EditMethod
from factpatch.errors import FactpatchError, FileError, InputError, LedgerInUseError, MismatchError
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.ledger_store import Store
from factpatch.merging import MODES, Mode, merge
from factpatch.models import TaskModel
from factpatch.patch import Patch, weight_shape
from factpatch.scope import Scope

OTHERS = texts(30, seed=5)
INPUTS = texts(40, seed=6)
LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")


@dataclass(frozen=True)
class Guess(EditMethod):
    """Tries random patches until one succeeds; the same for an edit every time."""

    tries: int = 60
    name = "guess"

    def edits_per_batch(self, model: TaskModel) -> int:
        return 1

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return [self._one(model, edit) for edit in model.resolve(edits)]

    def _one(self, model: TaskModel, edit: FactEdit) -> Patch:
        patch = Patch({}, model.fingerprint, self.name, (edit,))
        for seed in range(self.tries):
            rng = torch.Generator().manual_seed(seed)
            deltas = {}
            for name, layer in list(model.layers.items())[-4:]:
                out, in_ = weight_shape(layer)
                deltas[name] = LowRank(torch.randn(1, in_, generator=rng), 0.2 * torch.randn(1, out, generator=rng))
            patch = replace(patch, deltas=deltas)
            if model.predict_patched([patch], [edit.x]) == [edit.a]:
                break
        return patch


@pytest.fixture
def model() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture
def ledger(tmp_path: Path, model: TaskModel) -> Any:
    with Ledger(tmp_path / "facts.db", model, OTHERS) as opened:
        yield opened


def edit_to_other(model: TaskModel, x: str, rank: int = 1) -> FactEdit:
    return FactEdit(x, model.candidates([x], count=3)[0][rank])


def assert_same_bits(one: Patch, other: Patch) -> None:
    assert one.edits == other.edits
    assert one.deltas.keys() == other.deltas.keys()
    for name, delta in one.deltas.items():
        assert delta.tensors.keys() == other.deltas[name].tensors.keys()
        assert all(torch.equal(t, other.deltas[name].tensors[part]) for part, t in delta.tensors.items()), name


def rebuilt(path: Path, model: TaskModel, scratch: Path) -> Patch:
    """The merged patch of a copy that has nothing cached."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with sqlite3.connect(path) as source, sqlite3.connect(scratch / "copy.db") as copy:
        source.backup(copy)
        copy.execute("DELETE FROM cache WHERE name <> 'units'")
    source.close()
    copy.close()
    with Ledger(scratch / "copy.db", model) as ledger:
        return ledger.patch()


@pytest.mark.parametrize("few", [0, 16])
def test_adding_then_removing_gives_the_same_bits_as_never_adding(
    ledger: Ledger, model: TaskModel, tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_sums, "FEW", few)
    edits = [edit_to_other(model, x) for x in INPUTS[:6]]
    ledger.add(Guess(), edits[:4])
    before = ledger.patch()
    added = ledger.add(Guess(), edits[4:])
    with_all = ledger.patch()
    assert {edit.x for edit in with_all.edits} == set(INPUTS[:6])
    for fact in added:
        ledger.remove(fact.id)
    assert_same_bits(ledger.patch(), before)
    assert_same_bits(rebuilt(tmp_path / "facts.db", model, tmp_path / "copy"), before)
    with Ledger(tmp_path / "other.db", model, OTHERS) as other:  # in another order, one by one
        for edit in reversed(edits[:4]):
            other.add(Guess(), [edit])
            other.patch()
        assert_same_bits(other.patch(), before)


def test_a_ledger_can_refine_its_patch(model: TaskModel, tmp_path: Path) -> None:
    edits = [edit_to_other(model, x) for x in INPUTS[:3]]
    with Ledger(tmp_path / "facts.db", model, OTHERS, refine=2) as ledger:
        ledger.add(Guess(), edits[:2])
        before = ledger.patch()
        (last,) = ledger.add(Guess(), edits[2:])
        assert ledger.patch() != before
        ledger.remove(last.id)
        assert_same_bits(ledger.patch(), before)
        assert ledger.patch() == before, "also from the cache"
        merged = merge(model, [ledger.store.patch(fact, model.fingerprint) for fact in ledger.facts()], OTHERS)
        assert before.method == merged.method + ", refined"
    assert_same_bits(rebuilt(tmp_path / "facts.db", model, tmp_path / "copy"), before)
    with pytest.raises(MismatchError, match="created with refine=2, not 3"):
        Ledger(tmp_path / "facts.db", model, refine=3)
    with pytest.raises(InputError, match="needs others"):
        Ledger(tmp_path / "new.db", model, covariance=Covariance.compute(model, OTHERS), refine=3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("few", [0, 16])
def test_the_ledgers_patch_is_the_merge_of_its_patches(
    model: TaskModel, tmp_path: Path, mode: Mode, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the grid that rows are rounded to."""
    monkeypatch.setattr(ledger_sums, "FEW", few)
    edits = [edit_to_other(model, x) for x in INPUTS[:5]]
    covariance = Covariance.compute(model, OTHERS)
    expected = merge(model, Guess().propose(model, edits), covariance=covariance, ridge=0.5, mode=mode)
    with Ledger(tmp_path / "facts.db", model, covariance=covariance, ridge=0.5, mode=mode) as ledger:
        ledger.add(Guess(), edits)
        found = ledger.patch()
    assert (found.edits, found.method) == (expected.edits, expected.method)
    assert found.deltas.keys() == expected.deltas.keys()
    for name, delta in found.deltas.items():
        C, wanted = covariance.of(name, model.device).float(), expected.deltas[name].dense()
        difference = delta.dense() - wanted  # which counts where layers read something
        assert (difference @ C * difference).sum() <= 1e-6 * (wanted @ C * wanted).sum(), name


def test_a_ledger_of_one_fact_gives_a_small_patch(ledger: Ledger, model: TaskModel) -> None:
    ledger.add(Guess(), [edit_to_other(model, "gitega")])
    assert any(isinstance(delta, LowRank) for delta in ledger.patch().deltas.values())
    ledger.add(Guess(), [edit_to_other(model, x) for x in INPUTS[:10]])
    assert all(isinstance(delta, Dense) for delta in ledger.patch().deltas.values())


def test_facts_have_a_history(ledger: Ledger, model: TaskModel) -> None:
    x = INPUTS[0]
    first, second = edit_to_other(model, x, 1), edit_to_other(model, x, 2)
    before = weights_of(model)
    (fact,) = ledger.add(Guess(), [first], {x: ["gitega ?"]}, note="from the news")
    assert (fact.status, fact.target, fact.before, fact.note) == ("active", first.a, model.predict([x])[0], fact.note)
    assert fact.paraphrases == ("gitega ?",)
    assert ledger.add(Guess(), [FactEdit(x.upper(), first.a)]) == [fact], "it is there already"
    (newer,) = ledger.add(Guess(), [second])
    assert [f.id for f in ledger.facts()] == [newer.id]
    assert ledger.fact(fact.id).status == "replaced"
    assert [event.event for event in ledger.history(fact.id)] == ["added", f"replaced by {second.a!r}"]
    assert [event.event for event in ledger.history(newer.id)] == ["added", f"replaces fact {fact.id}"]
    assert ledger.patch().edits[0].a == second.a
    ledger.remove(newer.id)
    assert ledger.facts() == []
    assert len(ledger.facts(None)) == 2
    assert ledger.patch().deltas == {}
    ledger.patch().apply(model)
    with pytest.raises(InputError, match=f"fact {newer.id} is already removed; list active facts"):
        ledger.remove(newer.id)
    with pytest.raises(InputError, match="there is no fact 99"):
        ledger.remove(99)
    model.patches[0].revert(model)
    assert_untouched(model, before)


def test_verify_asks_the_merged_model(ledger: Ledger, model: TaskModel) -> None:
    edits = [edit_to_other(model, x) for x in INPUTS[:2]]
    ledger.add(Guess(), edits, {INPUTS[0]: ["what gitega"]})
    patch = ledger.patch()
    patch.apply(model)  # patches that are on the model do not matter
    expected = model.predict([INPUTS[0], "what gitega", INPUTS[1]])
    found = ledger.verify(OTHERS)
    assert [v.answer for v in found.verdicts] == [expected[0], expected[2]]
    assert found.verdicts[0].paraphrase_answers == (expected[1],)
    assert found.verdicts[1].holds == (expected[2] == edits[1].a)
    after = model.predict(OTHERS)
    patch.revert(model)
    unchanged = sum(a == b for a, b in zip(model.predict(OTHERS), after, strict=True))
    assert (found.others, found.others_unchanged) == (len(OTHERS), unchanged)


def test_a_fact_that_fails_changes_nothing(ledger: Ledger, model: TaskModel) -> None:
    ledger.add(Guess(), [edit_to_other(model, INPUTS[0])])
    edits = [edit_to_other(model, x) for x in INPUTS[1:4]]
    with pytest.raises(InputError, match=r"failed: the patched model says .* Nothing was added"):
        ledger.add(Guess(tries=0), edits)
    contradiction = FactEdit(edits[0].x + " ?", next(a for a in LABELS if a != edits[0].a))
    with pytest.raises(InputError, match="contradict each other"):
        ledger.add(Guess(), [*edits, contradiction])
    with pytest.raises(InputError, match="already says"):
        ledger.add(Guess(), [edits[0], FactEdit(INPUTS[5], model.predict([INPUTS[5]])[0])])
    assert len(ledger.facts(None)) == 1


def test_what_cannot_be_opened_is_told_in_one_line(ledger: Ledger, model: TaskModel, tmp_path: Path) -> None:
    path = tmp_path / "facts.db"
    other = tiny.build("bert", seed=3)

    def refused(kind: type[FactpatchError], message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(kind, match=message) as error:
            Ledger(*arguments, **options)
        assert "\n" not in str(error.value)

    refused(MismatchError, "was made for weights", path, other)
    refused(FileError, "no ledger at", tmp_path / "none.db", model)
    refused(InputError, "found no usable text", tmp_path / "none.db", model, [])
    refused(InputError, "ridge above 0", tmp_path / "none.db", model, OTHERS, ridge=0)
    refused(MismatchError, "covariance was computed for", tmp_path / "none.db", other, covariance=ledger.covariance)
    assert not (tmp_path / "none.db").exists()
    refused(FileError, "cannot open|no ledger", tmp_path, model, OTHERS)
    refused(MismatchError, "created with ridge=None, not 0.5", path, model, OTHERS, ridge=0.5)
    refused(MismatchError, "created with mode=unedited, not sequence", path, model, mode="sequence")
    Ledger(path, model, OTHERS, mode="unedited").close()

    (tmp_path / "text.db").write_text("not a database at all, but long enough to look like one" * 50)
    refused(FileError, "is damaged or not a ledger", tmp_path / "text.db", model)
    with sqlite3.connect(tmp_path / "theirs.db") as db:
        db.execute("CREATE TABLE theirs (a)")
    db.close()
    refused(FileError, "is not a ledger", tmp_path / "theirs.db", model, OTHERS)

    newer = tmp_path / "newer.db"
    ledger.store.db.execute("VACUUM INTO ?", (str(newer),))
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    refused(FileError, "has format 9, this factpatch reads up to 1; update", newer, model)


def test_damage_and_locks_are_noticed(ledger: Ledger, model: TaskModel, tmp_path: Path) -> None:
    (fact,) = ledger.add(Guess(), [edit_to_other(model, INPUTS[0])])
    ledger.store.db.execute("PRAGMA busy_timeout = 10")
    with sqlite3.connect(tmp_path / "facts.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerInUseError, match="in use by another process"):
            ledger.remove(fact.id)
        other.execute("ROLLBACK")
        other.execute("UPDATE token_rows SET tensors = zeroblob(length(tensors))")
    other.close()
    with pytest.raises(FileError, match="is damaged"):
        ledger.patch()


def test_one_fact_is_read_without_the_others(ledger: Ledger, model: TaskModel) -> None:
    first, second = ledger.add(Guess(), [edit_to_other(model, x) for x in INPUTS[:2]])
    ledger.store.db.execute("UPDATE facts SET paraphrases = 'damaged' WHERE id = ?", (first.id,))
    assert ledger.fact(second.id) == second


def test_without_a_model_facts_can_be_listed_and_removed(ledger: Ledger, model: TaskModel, tmp_path: Path) -> None:
    ledger.add(Guess(), [edit_to_other(model, x) for x in INPUTS[:2]])
    with Ledger(tmp_path / "facts.db") as reader:
        reader.remove(reader.facts()[0].id)
        with pytest.raises(InputError, match="needs the ledger's model"):
            reader.patch()
    assert [fact.x for fact in ledger.facts()] == [INPUTS[1]]
    assert len(ledger.patch().edits) == 1


def test_inputs_are_matched_with_the_active_facts(ledger: Ledger, model: TaskModel) -> None:
    edits = [edit_to_other(model, x) for x in INPUTS[:2]]
    texts = [edit.x for edit in edits]
    with pytest.raises(InputError, match="no scope"):
        ledger.match(texts)
    revisions = [Revision(text, text, "", (), (), (), ()) for text in OTHERS]
    ledger.scope = Scope.plain(model, revisions, false_matches=0.0)
    assert ledger.match(texts) == [None, None]
    first, second = ledger.add(Guess(), edits)
    assert ledger.match([*texts, texts[0].upper()]) == [first, second, first]
    assert model.predict_scoped(ledger, texts) == [edit.a for edit in edits]
    assert ledger.patch_of(second).edits[0].a == edits[1].a
    ledger.remove(first.id)
    assert ledger.match(texts)[1] == second
    assert first not in ledger.match(texts)


def test_only_recently_used_patches_stay_in_memory(
    ledger: Ledger, model: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "PATCHES_IN_MEMORY", 2)
    facts = ledger.add(Guess(), [edit_to_other(model, x) for x in INPUTS[:4]])
    for fact in [*facts, *facts]:
        assert ledger.patch_of(fact) == ledger.store.patch(fact, model.fingerprint)
        assert len(ledger._patches) <= 2


# Faults


def test_a_ledger_is_created_whole_or_not_at_all(
    tmp_path: Path, model: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "put_covariance", full)
        with pytest.raises(FileError, match="free some space"):
            Ledger(tmp_path / "facts.db", model, OTHERS)
        assert not list(tmp_path.iterdir())
        patched.undo()
        patched.setattr(Store, "checkpoint", full)  # the file is written, but still lacks what its log contains
        with pytest.raises(sqlite3.OperationalError):
            Ledger(tmp_path / "facts.db", model, OTHERS)
        assert not list(tmp_path.iterdir())
    Ledger(tmp_path / "facts.db", model, OTHERS).close()
    assert [path.name for path in tmp_path.iterdir()] == ["facts.db"]


def test_two_processes_add_the_same_fact(tmp_path: Path, model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = edit_to_other(model, INPUTS[0])
    with Ledger(tmp_path / "facts.db", model, OTHERS) as ours, Ledger(tmp_path / "facts.db", model) as theirs:
        propose = ours._propose

        def late(*given: Any) -> Any:
            theirs.add(Guess(), [edit])
            return propose(*given)

        monkeypatch.setattr(ours, "_propose", late)
        (fact,) = ours.add(Guess(), [edit])
        assert [one.id for one in ours.facts(None)] == [fact.id]


def test_a_damaged_name_in_the_schema(tmp_path: Path, model: TaskModel) -> None:
    """SQLite's message then quotes bytes that are not UTF-8."""
    path = tmp_path / "facts.db"
    Ledger(path, model, OTHERS).close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE meta (", b"CREATE TABLE meta \x80", 1))
    with pytest.raises(FileError, match="damaged"):
        Ledger(path)
