"""Ledger: the facts of one model over time. Each fact has its own patch; those of active facts are merged into one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from factpatch import merging, refining
from factpatch.covariance import Covariance
from factpatch.deltas import Delta
from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.errors import InputError, MismatchError
from factpatch.facts import FactEdit, normalize, same
from factpatch.files import new_file
from factpatch.ledger_checks import (
    check_rows,
    check_totals,
    check_units,
    stored_covariance,
    stored_others,
    stored_ridge,
    stored_settings,
)
from factpatch.ledger_store import Event, Fact, Status, Store
from factpatch.ledger_sums import Totals, add_to_totals, choose_units, quantized_rows, solve_rows, solve_totals
from factpatch.merging import Mode, unpatched
from factpatch.models import TaskModel
from factpatch.patch import Patch, check_template
from factpatch.scope import Scope, predict_scoped

FEW = 16  # up to this many facts, the merge is solved from their rows, which may give small factors
PATCHES_IN_MEMORY = 256
MOST_CACHED_BYTES = 512 << 20  # larger totals are not cached, but recomputed from the rows


@dataclass(frozen=True)
class Verdict:
    """The merged model's answers for one fact, and whether the fact holds."""

    fact: Fact
    answer: str
    paraphrase_answers: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return all(same(answer, self.fact.target) for answer in (self.answer, *self.paraphrase_answers))


@dataclass(frozen=True)
class Verification:
    """The merged model's answers for all facts, and how many control inputs keep their answers."""

    verdicts: list[Verdict]
    others: int
    others_unchanged: int


class Ledger:
    """Facts in one SQLite file, for one model.

    A new ledger needs `others`, a sample of ordinary inputs whose answers should stay as they are, or a `covariance`
    computed from such a sample. `ridge` is λ; by default the value that the editor has learned, or 1. `mode` is that of
    `merge`, by default "unedited". `refine` is the number of gradient steps that improve the merged patch; it needs
    `others`. All three are fixed when the ledger is created. Without a model, facts can only be listed and removed.
    """

    def __init__(
        self,
        path: str | Path,
        model: TaskModel | None = None,
        others: Iterable[str] | None = None,
        *,
        covariance: Covariance | None = None,
        ridge: float | None = None,
        mode: Mode | None = None,
        refine: int | None = None,
    ):
        merging.check_settings([] if ridge is None else [ridge], mode or "unedited")
        self._model = model
        self.scope: Scope | None = None
        others = None if others is None else list(others)
        self._patches: dict[int, Patch] = {}  # by fact id; a recorded patch never changes
        create = others is not None or covariance is not None
        if create and refine and not others:
            raise InputError("a ledger that refines its patch needs others: inputs whose answers should not change")
        if create and not Path(path).exists():
            found = self._prepare(covariance, others)
            with new_file(path) as scratch, closing(Store(scratch, create)) as self.store:
                self._initialise(found, others, ridge, mode or "unedited", refine or 0)
                self.store.settle()
        self.store = Store(path, create)
        try:
            if create and not self.store.get_meta():  # an empty file
                self._initialise(self._prepare(covariance, others), others, ridge, mode or "unedited", refine or 0)
            self.meta = self.store.get_meta()
            self.settings = self._checked_settings({"ridge": ridge, "mode": mode, "refine": refine})
            self.mode: Mode = self.settings["mode"]
        except BaseException:
            self.store.close()
            raise

    def _checked_settings(self, wanted: Mapping[str, object]) -> dict[str, Any]:
        """Reads the settings the ledger was created with.

        Raises a MismatchError if they, or its model, differ from what is wanted.
        """
        path = self.store.path
        found = stored_settings(self.store, self.meta)
        if self._model is not None and self.meta["base"] != self._model.fingerprint:
            check_template("the ledger", self.meta["base"], self._model.fingerprint)
            raise MismatchError(
                f"the ledger {path} belongs to weights {self.meta['base'][:12]}, this model has "
                f"{self._model.fingerprint[:12]}; load the model it was made for"
            )
        for name, value in wanted.items():
            if value not in (None, found[name]):
                raise MismatchError(
                    f"the ledger {path} was created with {name}={found[name]}, not {value}; "
                    f"leave {name} out, or create another ledger"
                )
        return found

    def _prepare(self, covariance: Covariance | None, others: Iterable[str] | None) -> Covariance:
        with unpatched(self.model):
            covariance = covariance or Covariance.compute(self.model, others or ())
            covariance.check_fits(self.model)
        return covariance

    def _initialise(
        self, covariance: Covariance, others: list[str] | None, ridge: float | None, mode: Mode, refine: int
    ) -> None:
        units = choose_units(self.model, covariance)
        with self.store.transaction():
            if self.store.get_meta():  # another process was faster
                return
            self.store.put_covariance(covariance.moments)
            self.store.put_cached("units", [], units)
            described = {"sample": covariance.sample, "count": covariance.count, "readers": covariance.readers}
            settings = {"ridge": ridge, "mode": mode, "refine": refine, "covariance": described}
            if refine:
                self.store.set_meta({"others": json.dumps(others)})
            identity = {"base": self.model.fingerprint, "identity": self.model.identity}
            self.store.set_meta({**identity, "settings": json.dumps(settings)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.store.close()

    @property
    def model(self) -> TaskModel:
        if self._model is None:
            raise InputError("this needs the ledger's model; pass the model when you open the ledger")
        return self._model

    @cached_property
    def covariance(self) -> Covariance:
        found = stored_covariance(self.store, self.meta["base"], self.settings)
        found.check_fits(self.model)
        return found

    @cached_property
    def units(self) -> dict[str, Tensor]:
        _, units = self.store.cached("units") or ([], {})
        check_units(self.store, units, self.model, self.covariance)
        return units

    def ridge(self, facts: Sequence[Fact]) -> dict[str, float]:
        """Returns λ of each weight.

        It is the ledger's setting, otherwise the value learned by these facts' editors, otherwise the default.
        """
        given = self.settings["ridge"]
        known = self.store.get_meta()
        ridges = (stored_ridge(self.store, known.get(f"ridge of {fact.id}", "{}")) for fact in facts)
        learned = (merging.mean_ridge(ridges) if given is None else None) or {}
        return {name: learned.get(name, given or merging.RIDGE) for name in self.covariance.readers}

    # Facts

    def facts(self, status: Status | None = "active") -> list[Fact]:
        """Returns the facts with this status. None means all facts that were ever added."""
        return self.store.facts(status)

    def fact(self, fact_id: int) -> Fact:
        return self.store.fact(fact_id)

    def history(self, fact_id: int) -> list[Event]:
        """Lists what happened to a fact, oldest first."""
        return self.store.history(self.fact(fact_id).id)

    def add(
        self,
        editor: EditMethod,
        edits: Sequence[FactEdit],
        paraphrases: Mapping[str, Sequence[str]] | None = None,
        note: str = "",
    ) -> list[Fact]:
        """Makes a patch for each edit, checks that it works, and records all of them, or none if one fails.

        An active fact about the same input is replaced, unless it has the same target. `paraphrases`, by input, are
        recorded for `verify`.
        """
        merging.check_conflicts(edits)
        wanted = {normalize(edit.x): edit for edit in edits}
        active = ((normalize(fact.x), fact) for fact in self.facts())
        known = {form: fact for form, fact in active if form in wanted and same(fact.target, wanted[form].a)}
        new = [edit for form, edit in wanted.items() if form not in known]
        made = self._propose(editor, new) if new else []
        with self.store.transaction():
            ids = [fact.id for fact in known.values()]
            for patch, rows in made:
                (edit,) = patch.edits
                before = self.store.active_with_input(edit.x)
                if before is not None and same(self.fact(before).target, edit.a):
                    ids.append(before)  # another process has added the same fact meanwhile
                    continue
                if before is not None:
                    self.store.retire(before, "replaced", f"replaced by {edit.a!r}")
                ids.append(self.store.insert(edit, (paraphrases or {}).get(edit.x, ()), note, patch, rows))
                if patch.ridge:
                    self.store.set_meta({f"ridge of {ids[-1]}": json.dumps(patch.ridge)})
                if before is not None:
                    self.store.record(ids[-1], f"replaces fact {before}")
        return [self.fact(i) for i in sorted(ids)]

    def _propose(self, editor: EditMethod, edits: Sequence[FactEdit]) -> list[tuple[Patch, dict[str, Tensor]]]:
        method = Looped(editor) if isinstance(editor, TrainableEditor) else editor
        with unpatched(self.model):
            patches = method.propose(self.model, edits)
            answers = self.model.predict_patched(patches, [patch.edits[0].x for patch in patches])
            for patch, answer in zip(patches, answers, strict=True):
                if not same(answer, patch.edits[0].a):
                    raise InputError(
                        f"the edit of {patch.edits[0].x!r} to {patch.edits[0].a!r} failed: the patched model says "
                        f"{answer!r}. Nothing was added; try a different wording, or leave this fact out"
                    )
            if self.mode == "sequence":  # solved from the patches themselves
                return [(patch, {}) for patch in patches]
            return [(patch, quantized_rows(self.model, patch, self.covariance, self.units)) for patch in patches]

    def remove(self, fact_id: int) -> None:
        """Removes a fact; its record and history stay. The merged patch is then as if it had never been added."""
        with self.store.transaction():
            fact = self.store.fact(fact_id)
            if fact.status != "active":
                raise InputError(
                    f"fact {fact_id} is already {fact.status}; list active facts with factpatch ledger list"
                )
            self.store.retire(fact_id, "removed", "removed")

    # The merged patch

    def patch(self) -> Patch:
        """Returns one patch that holds all active facts.

        It is computed once per set of facts and cached in the file.
        """
        with self.store.transaction(write=False):
            facts = sorted(self.facts(), key=lambda fact: merging.edit_key(fact.edit))
            ids = sorted(fact.id for fact in facts)
            edits, steps = tuple(fact.edit for fact in facts), self.settings["refine"] if facts else 0
            method = merging.merged_name(self.store.methods())
            cached_ids, cached = self.store.cached("merged") or (None, {})
            if cached_ids == ids:
                method += refining.REFINED if steps else ""
                return Patch(self.store.deltas(cached), self.meta["base"], method, edits)
            deltas, totals = self._merge(facts)
        merged = Patch(deltas, self.meta["base"], method, edits)
        if steps:
            merged = refining.refine(self.model, merged, stored_others(self.store, self.meta["others"]), steps)
        self._keep(ids, merged, totals)
        return merged

    @torch.no_grad()
    def _merge(self, facts: Sequence[Fact]) -> tuple[dict[str, Delta], Totals | None]:
        if not facts:
            return {}, None
        if self.mode == "sequence":
            patches = [self.store.patch(fact, self.meta["base"]) for fact in facts]
            ridge, mode = self.ridge(facts), self.mode
            return merging.merge(self.model, patches, covariance=self.covariance, ridge=ridge, mode=mode).deltas, None
        if len(facts) <= FEW:
            rows = [self._rows(fact.id) for fact in facts]
            return solve_rows(self.model, rows, self.units, self.covariance, self.ridge(facts)), None
        totals = self._totals([fact.id for fact in facts])
        return solve_totals(self.model, totals, len(facts), self.units, self.covariance, self.ridge(facts)), totals

    def _rows(self, fact_id: int) -> dict[str, Tensor]:
        rows = self.store.rows(fact_id)
        check_rows(self.store, rows, self.model, self.covariance)
        return rows

    def _totals(self, ids: Sequence[int]) -> Totals:
        """Computes the sums over facts, from the cached sums if few facts have been added or removed since."""
        before, totals = self.store.cached("totals") or ([], {})
        check_totals(self.store, totals, self.model, self.covariance)
        gone, new = set(before) - set(ids), set(ids) - set(before)
        if len(gone) + len(new) > len(ids):
            totals, gone, new = {}, set(), set(ids)
        readers = self.covariance.readers
        add_to_totals(totals, map(self._rows, sorted(gone)), readers, -1)
        add_to_totals(totals, map(self._rows, sorted(new)), readers, 1)
        return totals

    def _keep(self, ids: list[int], merged: Patch, totals: Totals | None) -> None:
        size = sum(total.nbytes for total in (totals or {}).values())
        with self.store.transaction():
            if self.store.active_ids() != ids:  # another process has changed the facts meanwhile
                return
            self.store.put_cached("merged", ids, merged.tensors())
            if totals is not None and size <= MOST_CACHED_BYTES:
                self.store.put_cached("totals", ids, totals)
            self.store.drop_rows_of_others([*ids, *self.store.cached_ids("totals")])

    def predict_scoped(self, inputs: Sequence[str]) -> list[str]:
        """Answers each input under the patch of the fact that it is about, or with the unedited model.

        `self.scope`, a trained or a plain `Scope`, decides which fact that is, if any.
        """
        scope, facts = self._index()
        return predict_scoped(self.model, scope, [self.patch_of(fact) for fact in facts], inputs)

    def match(self, inputs: Sequence[str]) -> list[Fact | None]:
        """Returns the active fact that each input is about, or None, as `self.scope` decides."""
        scope, facts = self._index()
        return [None if number is None else facts[number] for number in scope.match(inputs)]

    def _index(self) -> tuple[Scope, list[Fact]]:
        if self.scope is None:
            raise InputError("the ledger has no scope yet; set ledger.scope to one, such as Scope.load(file, model)")
        facts = self.facts()
        return self.scope.index([[fact.x, *fact.paraphrases] for fact in facts]), facts

    def patch_of(self, fact: Fact) -> Patch:
        """Returns the patch of one active fact. Recently used patches are kept in memory."""
        if fact.id not in self._patches:
            while len(self._patches) >= PATCHES_IN_MEMORY:
                del self._patches[next(iter(self._patches))]
            self._patches[fact.id] = self.store.patch(fact, self.meta["base"])
        return self._patches[fact.id]

    def verify(self, others: Sequence[str] = ()) -> Verification:
        """Runs the merged model on all active facts and their paraphrases, and counts unchanged answers to `others`."""
        facts = self.facts()
        texts = [text for fact in facts for text in (fact.x, *fact.paraphrases)]
        with unpatched(self.model):
            before = self.model.predict(others, cut=True)
            with self.patch().applied(self.model):
                answers = iter(self.model.predict(texts, cut=True))
                after = self.model.predict(others, cut=True)
        verdicts = [Verdict(fact, next(answers), tuple(next(answers) for _ in fact.paraphrases)) for fact in facts]
        return Verification(verdicts, len(others), sum(map(same, before, after)))
