"""The service behind the API and the page: one model, one editor, one ledger, and the proposals of all clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.engine import edited
from factpatch.errors import FactpatchError, InputError
from factpatch.facts import FactEdit, normalize, same
from factpatch.ledger import Ledger
from factpatch.ledger_store import Event, Fact
from factpatch.models import TaskModel
from factpatch.models.answers import Answer, best_answers, best_answers_patched
from factpatch.patch import Patch, stack_patches
from factpatch.scope import Scope
from factpatch.serve.downloads import adapter_file, ledger_file, patch_file
from factpatch.serve.limits import Limits
from factpatch.serve.proposals import Comparison, Control, Proposal, Proposals, UnknownError
from factpatch.serve.questions import Questions
from factpatch.serve.worker import Handler, Worker, chained

ASKS_PER_BATCH, PATCHES_PER_BATCH = 64, 8


@dataclass(frozen=True)
class Ask:
    question: str
    with_facts: bool


@dataclass(frozen=True)
class Answered:
    """The best answers to a question, and the accepted fact that they come from, if any."""

    question: str  # as the model read it
    answers: list[Answer]
    fact: Fact | None


@dataclass(frozen=True)
class Correction:
    """A correction that a client would like to try."""

    question: str
    target: str
    paraphrases: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Which accepted facts hold when the service is asked, and how many control questions keep their answers."""

    holding: list[Fact]
    lost: list[Fact]
    controls: int
    controls_unchanged: int


class Service:
    """Answers, proposes and records facts. Each method returns a future that the worker's thread fulfils."""

    def __init__(
        self,
        model: TaskModel,
        editor: EditMethod,
        ledger: str | Path,
        scope: Scope,
        questions: Questions,
        limits: Limits | None = None,
    ):
        self.model, self.questions, self.limits = model, questions, limits or Limits()
        self.editor = Looped(editor) if isinstance(editor, TrainableEditor) else editor
        self.proposals = Proposals(self.limits)
        self._worker = Worker(self.limits.queue)
        self._asks = Handler(self._answer_all, ASKS_PER_BATCH)
        self._corrections = Handler(self._patch_all, PATCHES_PER_BATCH)
        self._tries = Handler(self._try_all, batch_size=1)
        try:
            self._worker.call(lambda: self._open(ledger, scope)).result()
        except BaseException:
            self._worker.close()
            raise

    def _open(self, path: str | Path, scope: Scope) -> None:
        self._ledger = Ledger(path, self.model)  # SQLite connections belong to the thread that opens them
        self._ledger.scope = scope
        self._control_answers = dict(
            zip(self.questions.controls, self.model.predict(self.questions.controls, cut=True), strict=True)
        )

    def close(self) -> None:
        self._worker.close(lambda: self._ledger.close())

    # Asking

    def ask(self, question: str, with_facts: bool = True) -> Future[Answered]:
        return self._worker.submit(self._asks, Ask(self.questions.spell(question), with_facts))

    def _answer_all(self, asks: list[Ask]) -> list[Answered | FactpatchError]:
        problems = [_problem(lambda ask=ask: self.model.check_input(ask.question)) for ask in asks]
        answered = iter(self._answers([ask for ask, wrong in zip(asks, problems, strict=True) if wrong is None]))
        return [next(answered) if wrong is None else wrong for wrong in problems]

    def _answers(self, asks: Sequence[Ask]) -> list[Answered]:
        """Answers each question under the patch of the accepted fact that it is about, or with the unedited model."""
        texts = [ask.question for ask in asks]
        matched = self._ledger.match(texts) if texts else []
        facts = [fact if ask.with_facts else None for ask, fact in zip(asks, matched, strict=True)]
        plain = list(dict.fromkeys(text for text, fact in zip(texts, facts, strict=True) if fact is None))
        unpatched = dict(zip(plain, best_answers(self.model, plain), strict=True))
        edited_rows = {(text, fact.id): fact for text, fact in zip(texts, facts, strict=True) if fact is not None}
        patches = [self._ledger.patch_of(fact) for fact in edited_rows.values()]
        patched_answers = best_answers_patched(self.model, patches, [text for text, _ in edited_rows])
        patched = dict(zip(edited_rows, patched_answers, strict=True))
        return [
            Answered(text, unpatched[text] if fact is None else patched[text, fact.id], fact)
            for text, fact in zip(texts, facts, strict=True)
        ]

    # Proposing

    def propose(self, question: str, target: str, paraphrases: Sequence[str] = ()) -> Future[Proposal]:
        spelled = self.questions.spell(question)
        others = {normalize(text): self.questions.spell(text) for text in paraphrases if text.strip()}
        others.pop(normalize(spelled), None)
        correction = Correction(spelled, target.strip(), tuple(others.values()))
        made = self._worker.submit(self._corrections, correction)
        # Trying a patch takes longer than making it, so that questions get their turn in between.
        return chained(made, lambda patch: self._worker.submit(self._tries, (correction, patch)))

    def _patch_all(self, corrections: list[Correction]) -> list[Patch | FactpatchError]:
        """Makes the patches of all corrections in one batch."""
        checked = [self._resolve(correction) for correction in corrections]
        edits = [edit for edit in checked if isinstance(edit, FactEdit)]
        patches = iter(self.editor.propose(self.model, edits) if edits else [])
        return [next(patches) if isinstance(edit, FactEdit) else edit for edit in checked]

    def _resolve(self, correction: Correction) -> FactEdit | FactpatchError:
        active = next((fact for fact in self._ledger.facts() if same(fact.x, correction.question)), None)
        if active is not None and same(active.target, correction.target):
            return InputError(f"this is accepted already, as fact {active.id}")
        if active is not None and same(active.before, correction.target):
            return InputError(f"the unedited model says this already; remove fact {active.id} to get it back")
        try:
            for text in correction.paraphrases:
                self.model.check_input(text)
            return self.model.resolve([FactEdit(correction.question, correction.target)])[0]
        except FactpatchError as error:
            return error

    def _try_all(self, tries: list[tuple[Correction, Patch]]) -> list[Proposal]:
        return [self._try(correction, patch) for correction, patch in tries]

    def _try(self, correction: Correction, patch: Patch) -> Proposal:
        """Tries a patch on its own questions and on the control questions."""
        wordings = [correction.question, *correction.paraphrases]
        controls = self.questions.controls_besides(wordings)
        before = self._answers([Ask(text, with_facts=True) for text in wordings])
        with edited(self.model.layers, stack_patches([patch], self.model.layers)):
            after = best_answers(self.model, wordings)
            control_answers = self.model.predict(controls, cut=True)
        own, *others = [Comparison(now.question, now.answers, new) for now, new in zip(before, after, strict=True)]
        scope = self._ledger.scope
        assert scope is not None
        in_scope = [number is not None for number in copy.copy(scope).index([wordings]).match(controls)]
        sample = [
            Control(text, self._control_answers[text], answer, inside)
            for text, answer, inside in zip(controls, control_answers, in_scope, strict=True)
        ]
        proposal = Proposal(patch.edits[0], patch, own, others, sample)
        self.proposals.put(proposal)
        return proposal

    def accept(self, proposal_id: str, note: str = "") -> Future[Fact]:
        return self._worker.call(lambda: self._accept(proposal_id, note))

    def _accept(self, proposal_id: str, note: str) -> Fact:
        proposal = self.proposals.get(proposal_id)
        if not proposal.success:
            raise InputError("this correction does not work, so it cannot be accepted; try another wording or answer")
        paraphrases = {proposal.edit.x: [one.question for one in proposal.paraphrases]}
        (fact,) = self._ledger.add(_Precomputed(proposal.patch), [proposal.edit], paraphrases, note)
        self.proposals.discard(proposal_id)
        return fact

    # The ledger

    def facts(self, search: str = "", active_only: bool = True) -> Future[list[Fact]]:
        """The recorded facts that contain all words of the search, newest first."""

        def found() -> list[Fact]:
            facts = self._ledger.facts("active" if active_only else None)
            return [fact for fact in reversed(facts) if _contains(fact, search)]

        return self._worker.call(found)

    def history(self, fact_id: int) -> Future[tuple[Fact, list[Event]]]:
        return self._worker.call(lambda: (self._fact(fact_id), self._ledger.history(fact_id)))

    def remove(self, fact_id: int) -> Future[Fact]:
        def removed() -> Fact:
            self._fact(fact_id)
            self._ledger.remove(fact_id)
            return self._fact(fact_id)

        return self._worker.call(removed)

    def _fact(self, fact_id: int) -> Fact:
        for fact in self._ledger.facts(None):
            if fact.id == fact_id:
                return fact
        raise UnknownError(f"there is no fact {fact_id}; list the facts to see their numbers")

    def verify(self) -> Future[Check]:
        return self._worker.call(self._verify)

    def _verify(self) -> Check:
        """Asks every wording of every accepted fact, and the control questions that are not about one of them."""
        facts = self._ledger.facts()
        texts = {text: fact for fact in facts for text in (fact.x, *fact.paraphrases)}
        controls = self.questions.controls_besides(list(texts))
        answered = self._answers([Ask(text, with_facts=True) for text in [*texts, *controls]])
        says = {found.question: found.answers[0].text for found in answered}
        wrong = {fact.id for text, fact in texts.items() if not same(says[text], fact.target)}
        unchanged = sum(same(says[text], self._control_answers[text]) for text in controls)
        holding = [fact for fact in facts if fact.id not in wrong]
        return Check(holding, [fact for fact in facts if fact.id in wrong], len(controls), unchanged)

    # Downloads

    def merged_patch(self) -> Future[bytes]:
        """All accepted facts in one patch file."""
        return self._worker.call(lambda: patch_file(self._merged()))

    def merged_adapter(self) -> Future[bytes]:
        """All accepted facts as one zipped PEFT adapter."""
        return self._worker.call(lambda: adapter_file(self._merged(), self.model))

    def fact_patch(self, fact_id: int) -> Future[bytes]:
        def packed() -> bytes:
            if (fact := self._fact(fact_id)).status != "active":
                raise UnknownError(f"fact {fact_id} is not active, so it has no patch")
            return patch_file(self._ledger.patch_of(fact))

        return self._worker.call(packed)

    def proposal_patch(self, proposal_id: str) -> Future[bytes]:
        return self._worker.call(lambda: patch_file(self.proposals.get(proposal_id).patch))

    def ledger_file(self) -> Future[bytes]:
        return self._worker.call(lambda: ledger_file(self._ledger))

    def _merged(self) -> Patch:
        if not self._ledger.facts():
            raise InputError("there are no accepted facts yet; accept one first")
        return self._ledger.patch()


@dataclass(frozen=True)
class _Precomputed(EditMethod):
    """An edit method for a patch that has been made already: what was tried is exactly what is recorded."""

    patch: Patch

    @property
    def name(self) -> str:
        return self.patch.method

    def edits_per_batch(self, model: TaskModel) -> int:
        return 1

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return [self.patch]


def _problem(check: Callable[[], object]) -> FactpatchError | None:
    try:
        check()
    except FactpatchError as error:
        return error
    return None


def _contains(fact: Fact, search: str) -> bool:
    text = f"{fact.x} {fact.before} {fact.target} {fact.note} {' '.join(fact.paraphrases)}".casefold()
    return all(word in text for word in search.casefold().split())
