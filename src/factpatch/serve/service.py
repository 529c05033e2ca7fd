"""The service behind the API and the page: one model, one editor, one ledger, and the proposals of all clients."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factpatch.editors import EditMethod, Looped, TrainableEditor
from factpatch.errors import FactpatchError, InputError
from factpatch.export import check_rank
from factpatch.facts import FactEdit, normalize, same
from factpatch.ledger import Ledger
from factpatch.ledger_store import Event, Fact
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.scope import Scope
from factpatch.serve.answering import Answered, Answering, Ask
from factpatch.serve.downloads import adapter_file, ledger_file, patch_file
from factpatch.serve.limits import Limits
from factpatch.serve.proposals import Proposal, Proposals, UnknownError
from factpatch.serve.questions import Questions
from factpatch.serve.trials import Correction, Trials
from factpatch.serve.worker import Handler, Worker, chained

ASKS_PER_BATCH, PATCHES_PER_BATCH = 64, 8


@dataclass(frozen=True)
class Check:
    """A check of the service: which accepted facts hold, and how many control questions keep their answers."""

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
        self._asks = Handler(self._answer_all, ASKS_PER_BATCH, urgent=True)
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
        self._answering = Answering(self.model, self._ledger)
        self._trials = Trials(self.model, scope, self.questions, self._answering)

    def close(self) -> None:
        self._worker.close(lambda: self._ledger.close())

    # Asking

    def ask(self, question: str, with_facts: bool = True) -> Future[Answered]:
        return self._worker.submit(self._asks, Ask(self.questions.spell(question), with_facts))

    def _answer_all(self, asks: list[Ask]) -> list[Answered | FactpatchError]:
        readable = self.model.encode_readable([ask.question for ask in asks])
        answered = iter(self._answering.answer([ask for ask in asks if ask.question in readable]))
        return [next(answered) if ask.question in readable else self._problem(ask.question) for ask in asks]

    def _problem(self, question: str) -> FactpatchError:
        try:
            self.model.check_input(question)
        except FactpatchError as error:
            return error
        raise AssertionError("a readable question was refused")

    # Proposing

    def propose(self, question: str, target: str, paraphrases: Sequence[str] = ()) -> Future[Proposal]:
        spelled = self.questions.spell(question)
        others = {normalize(text): self.questions.spell(text) for text in paraphrases if text.strip()}
        others.pop(normalize(spelled), None)
        correction = Correction(spelled, target.strip(), tuple(others.values()))
        made = self._worker.submit(self._corrections, correction)
        # Trying a patch is slow, so it is queued separately: questions can be answered in between.
        return chained(made, lambda patch: self._worker.submit(self._tries, (correction, patch)))

    def _patch_all(self, corrections: list[Correction]) -> list[Patch | FactpatchError]:
        """Makes the patches of all corrections in one batch."""
        refused = [self._refusal(correction) for correction in corrections]
        wanted = [
            FactEdit(one.question, one.target) for one, no in zip(corrections, refused, strict=True) if no is None
        ]
        resolved = iter(self.model.resolve_each(wanted))
        checked = [no or next(resolved) for no in refused]
        edits = [edit for edit in checked if isinstance(edit, FactEdit)]
        patches = iter(self.editor.propose(self.model, edits) if edits else [])
        return [next(patches) if isinstance(edit, FactEdit) else edit for edit in checked]

    def _refusal(self, correction: Correction) -> FactpatchError | None:
        active = next((fact for fact in self._ledger.facts() if same(fact.x, correction.question)), None)
        if active is not None and same(active.target, correction.target):
            return InputError(f"this fact was already accepted as fact {active.id}; nothing to do")
        if active is not None and same(active.before, correction.target):
            return InputError(f"this is already the unedited model's answer; remove fact {active.id} to get it back")
        try:
            for text in correction.paraphrases:
                self.model.check_input(text)
        except FactpatchError as error:
            return error
        return None

    def _try_all(self, tries: list[tuple[Correction, Patch]]) -> list[Proposal]:
        tried = [self._trials.run(correction, patch) for correction, patch in tries]
        for proposal in tried:
            self.proposals.put(proposal)
        return tried

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
        """Returns the recorded facts that contain all words of the search, newest first."""

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
        uncached = Answering(self.model, self._ledger)
        answered = uncached.answer([Ask(text, with_facts=True) for text in [*texts, *controls]])
        says = {found.question: found.answers[0].text for found in answered}
        wrong = {fact.id for text, fact in texts.items() if not same(says[text], fact.target)}
        unchanged = sum(same(says[text], self._trials.control_answers[text]) for text in controls)
        holding = [fact for fact in facts if fact.id not in wrong]
        return Check(holding, [fact for fact in facts if fact.id in wrong], len(controls), unchanged)

    # Downloads

    def merged_patch(self) -> Future[bytes]:
        """Returns all accepted facts in one patch file."""
        return self._worker.call(lambda: patch_file(self._merged()))

    def merged_adapter(self, rank: int | None = None) -> Future[bytes]:
        """Returns all accepted facts as one zipped PEFT adapter."""
        check_rank(rank)
        return self._worker.call(lambda: adapter_file(self._merged(), self.model, rank))

    def fact_patch(self, fact_id: int) -> Future[bytes]:
        def packed() -> bytes:
            if (fact := self._fact(fact_id)).status != "active":
                raise UnknownError(f"fact {fact_id} is not active, so it has no patch; choose an active fact")
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
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is only read)
        return self.patch.method

    def edits_per_batch(self, model: TaskModel) -> int:
        return 1

    def describe(self, model: TaskModel) -> dict[str, Any]:
        return {}

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        return [self.patch]


def _contains(fact: Fact, search: str) -> bool:
    text = f"{fact.x} {fact.before} {fact.target} {fact.note} {' '.join(fact.paraphrases)}".casefold()
    return all(word in text for word in search.casefold().split())
