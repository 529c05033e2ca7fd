"""Ledger: the facts of one model over time. Each fact has its own patch; those of active facts are merged into one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from factpatch import merging, refining
from factpatch.covariance import Covariance
from factpatch.deltas import Delta
from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.errors import InputError
from factpatch.facts import FactEdit, normalize, same
from factpatch.files import new_file
from factpatch.fingerprints import check_base
from factpatch.ledger_settings import initialise, stored_covariance, stored_others, stored_ridge, stored_settings
from factpatch.ledger_store import Event, Fact, Status, Store
from factpatch.ledger_sums import FactSums, Rows, Totals
from factpatch.merging import Mode
from factpatch.models import TaskModel
from factpatch.patch import Patch, unpatched
from factpatch.scope import Scope, predict_scoped

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
        settings = {"ridge": ridge, "mode": mode or "unedited", "refine": refine or 0}
        if create and not Path(path).exists():
            covariance = self._fitting_covariance(covariance, others)
            with new_file(path) as scratch, closing(Store(scratch, create)) as store:
                initialise(store, self.model, covariance, others, settings)
                store.checkpoint()
        self.store = Store(path, create)
        try:
            if create and not self.store.get_meta():  # an empty file
                covariance = self._fitting_covariance(covariance, others)
                initialise(self.store, self.model, covariance, others, settings)
            self.meta = self.store.get_meta()
            self.settings = stored_settings(self.store, self.meta, {"ridge": ridge, "mode": mode, "refine": refine})
            self.mode: Mode = self.settings["mode"]
            if model is not None:
                advice = "load the model it was made for"
                check_base(f"the ledger {path} was made", self.meta["base"], model.fingerprint, advice)
        except BaseException:
            self.store.close()
            raise

    def _fitting_covariance(self, covariance: Covariance | None, others: Iterable[str] | None) -> Covariance:
        """Returns the covariance that was given, if it fits the model, or else computes it from the other inputs."""
        with unpatched(self.model):
            covariance = covariance or Covariance.compute(self.model, others or ())
            covariance.check_fits(self.model)
        return covariance

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
        covariance = stored_covariance(self.store, self.meta["base"], self.settings)
        covariance.check_fits(self.model)
        return covariance

    @cached_property
    def sums(self) -> FactSums:
        return FactSums(self.store, self.model, self.covariance)

    def ridge(self, facts: Sequence[Fact]) -> dict[str, float]:
        """Returns λ of each weight.

        It is the ledger's setting, otherwise the value learned by these facts' editors, otherwise the default.
        """
        if (ridge := self.settings["ridge"]) is not None:
            return {name: float(ridge) for name in self.covariance.readers}
        meta = self.store.get_meta()
        learned = merging.mean_ridge(stored_ridge(self.store, meta.get(f"ridge of {fact.id}", "{}")) for fact in facts)
        return {name: learned.get(name, merging.RIDGE) for name in self.covariance.readers}

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
        proposed = self._propose(editor, new) if new else []
        with self.store.transaction():
            ids = [fact.id for fact in known.values()]
            for patch, rows in proposed:
                (edit,) = patch.edits
                before = self.store.active_with_input(edit.x)
                if before and same(before.target, edit.a):
                    ids.append(before.id)  # another process has added the same fact meanwhile
                    continue
                if before:
                    self.store.retire(before.id, "replaced", f"replaced by {edit.a!r}")
                ids.append(self.store.insert(edit, (paraphrases or {}).get(edit.x, ()), note, patch, rows))
                if patch.ridge:
                    self.store.set_meta({f"ridge of {ids[-1]}": json.dumps(patch.ridge)})
                if before:
                    self.store.record(ids[-1], f"replaces fact {before.id}")
        return [self.fact(i) for i in sorted(ids)]

    def _propose(self, editor: EditMethod, edits: Sequence[FactEdit]) -> list[tuple[Patch, Rows]]:
        method = Looped(editor) if isinstance(editor, TrainableEditor) else editor
        with unpatched(self.model):
            patches = method.propose(self.model, edits)
            asked = [edit for patch in patches for edit in patch.edits]
            answers = self.model.predict_patched(patches, [edit.x for edit in asked])
            for edit, answer in zip(asked, answers, strict=True):
                if not same(answer, edit.a):
                    raise InputError(
                        f"the edit of {edit.x!r} to {edit.a!r} failed: the patched model says {answer!r}. "
                        "Nothing was added; try a different wording, or leave this fact out"
                    )
            if self.mode == "sequence":  # solved from the patches themselves
                return [(patch, {}) for patch in patches]
            return [(patch, self.sums.quantized_rows(patch)) for patch in patches]

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
        self._cache(ids, merged, totals)
        return merged

    @torch.no_grad()
    def _merge(self, facts: Sequence[Fact]) -> tuple[dict[str, Delta], Totals | None]:
        if not facts:
            return {}, None
        if self.mode == "sequence":
            patches = [self.store.patch(fact, self.meta["base"]) for fact in facts]
            ridge, mode = self.ridge(facts), self.mode
            return merging.merge(self.model, patches, covariance=self.covariance, ridge=ridge, mode=mode).deltas, None
        return self.sums.solve([fact.id for fact in facts], self.ridge(facts))

    def _cache(self, ids: list[int], merged: Patch, totals: Totals | None) -> None:
        size = sum(total.nbytes for total in (totals or {}).values())
        with self.store.transaction():
            if self.store.active_ids() != ids:  # another process has changed the facts meanwhile
                return
            self.store.put_cached("merged", ids, merged.tensors())
            if totals is not None and size <= MOST_CACHED_BYTES:
                self.store.put_cached("totals", ids, totals)
            self.store.drop_rows_of_others([*ids, *self.store.cached_ids("totals")])

    # Answers

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

    def verify(self, others: Sequence[str] = (), facts: Sequence[Fact] | None = None) -> Verification:
        """Runs the merged model on facts and their paraphrases, and counts unchanged answers to `others`.

        By default, all active facts are verified.
        """
        facts = self.facts() if facts is None else facts
        texts = [text for fact in facts for text in (fact.x, *fact.paraphrases)]
        with unpatched(self.model):
            before = self.model.predict(others, cut=True)
            with self.patch().applied(self.model):
                answers = iter(self.model.predict(texts, cut=True))
                after = self.model.predict(others, cut=True)
        verdicts = [Verdict(fact, next(answers), tuple(next(answers) for _ in fact.paraphrases)) for fact in facts]
        return Verification(verdicts, len(others), sum(map(same, before, after)))
