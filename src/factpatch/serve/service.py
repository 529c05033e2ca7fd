"""The service behind the API and the page: one model, one editor, one ledger, and the proposals of all clients."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from factpatch.editors import SURE, EditMethod, Looped, TrainableEditor
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
from factpatch.serve.worker import Handler, Worker

ASKS_PER_BATCH, PATCHES_PER_BATCH = 64, 8
Given = ParamSpec("Given")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Check:
    """A check of the service: which accepted facts hold, and how many control questions keep their answers."""

    holding: list[Fact]
    lost: list[Fact]
    controls: int
    controls_unchanged: int


def on_worker(
    method: Callable[Concatenate[Service, Given], Result],
) -> Callable[Concatenate[Service, Given], Coroutine[Any, Any, Result]]:
    """Turns a method of the service into a coroutine that waits while the worker's thread runs the method."""

    @wraps(method)
    async def run(self: Service, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await wrap_future(self._worker.call(lambda: method(self, *args, **kwargs)))

    return run


class Service:
    """Answers, proposes and records facts. The worker's thread does all the work; each coroutine waits for it."""

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
        self.editor = Looped(editor, sure=SURE) if isinstance(editor, TrainableEditor) else editor
        self.proposals = Proposals(self.limits)
        self._worker = Worker(self.limits.queue)
        self._asks = Handler(self._answer_all, ASKS_PER_BATCH, urgent=True)
        self._corrections = Handler(self._patch_all, PATCHES_PER_BATCH)
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
        self._worker.close(self._ledger.close)

    # Asking

    async def ask(self, question: str, with_facts: bool = True) -> Answered:
        return await wrap_future(self._worker.submit(self._asks, Ask(self.questions.spell(question), with_facts)))

    def _answer_all(self, asks: list[Ask]) -> list[Answered | FactpatchError]:
        return apply_to_valid(self._answering.answer, [self._unreadable(ask.question) or ask for ask in asks])

    def _unreadable(self, *texts: str) -> FactpatchError | None:
        """Returns the error if the model cannot read one of the texts."""
        try:
            for text in texts:
                self.model.check_input(text)
        except FactpatchError as error:
            return error
        return None

    # Proposing

    async def propose(self, question: str, target: str, paraphrases: Sequence[str] = ()) -> Proposal:
        spelled = self.questions.spell(question)
        others = {normalize(text): self.questions.spell(text) for text in paraphrases if text.strip()}
        others.pop(normalize(spelled), None)
        correction = Correction(spelled, target.strip(), tuple(others.values()))
        patch = await wrap_future(self._worker.submit(self._corrections, correction))
        # Trying a patch is slow, so it is queued separately: questions can be answered in between.
        return await self._try(correction, patch)

    def _patch_all(self, corrections: list[Correction]) -> list[Patch | FactpatchError]:
        """Makes the patches of all corrections in one batch."""
        edits = [self._refusal(one) or FactEdit(one.question, one.target) for one in corrections]
        return apply_to_valid(partial(self.editor.propose, self.model), apply_to_valid(self.model.resolve_each, edits))

    def _refusal(self, correction: Correction) -> FactpatchError | None:
        active = next((fact for fact in self._ledger.facts() if same(fact.x, correction.question)), None)
        if active is not None and same(active.target, correction.target):
            return InputError(f"this fact was already accepted as fact {active.id}; nothing to do")
        if active is not None and same(active.before, correction.target):
            return InputError(f"this is already the unedited model's answer; remove fact {active.id} to get it back")
        return self._unreadable(*correction.paraphrases)

    @on_worker
    def _try(self, correction: Correction, patch: Patch) -> Proposal:
        proposal = self._trials.run(correction, patch)
        self.proposals.put(proposal)
        return proposal

    @on_worker
    def accept(self, proposal_id: str, note: str = "") -> Fact:
        proposal = self.proposals.get(proposal_id)
        if not proposal.success:
            raise InputError("this correction does not work, so it cannot be accepted; try another wording or answer")
        paraphrases = {proposal.edit.x: [one.question for one in proposal.paraphrases]}
        (fact,) = self._ledger.add(_Precomputed(proposal.patch), [proposal.edit], paraphrases, note)
        with suppress(UnknownError):  # it has expired or been discarded meanwhile, but the fact is recorded
            self.proposals.discard(proposal_id)
        return fact

    # The ledger

    @on_worker
    def facts(self, search: str = "", active_only: bool = True) -> list[Fact]:
        """Returns the recorded facts that contain all words of the search, newest first."""
        facts = self._ledger.facts("active" if active_only else None)
        return [fact for fact in reversed(facts) if _contains(fact, search)]

    @on_worker
    def history(self, fact_id: int) -> tuple[Fact, list[Event]]:
        return self._fact(fact_id), self._ledger.history(fact_id)

    @on_worker
    def remove(self, fact_id: int) -> Fact:
        self._fact(fact_id)  # a fact that does not exist is an UnknownError
        self._ledger.remove(fact_id)
        return self._fact(fact_id)

    def _fact(self, fact_id: int) -> Fact:
        for fact in self._ledger.facts(None):
            if fact.id == fact_id:
                return fact
        raise UnknownError(f"there is no fact {fact_id}; list the facts to see their numbers")

    @on_worker
    def verify(self) -> Check:
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

    @on_worker
    def merged_patch(self) -> bytes:
        """Returns all accepted facts in one patch file."""
        return patch_file(self._merged())

    @on_worker
    def merged_adapter(self, rank: int | None = None) -> bytes:
        """Returns all accepted facts as one zipped PEFT adapter."""
        check_rank(rank)
        return adapter_file(self._merged(), self.model, rank)

    @on_worker
    def fact_patch(self, fact_id: int) -> bytes:
        if (fact := self._fact(fact_id)).status != "active":
            raise UnknownError(f"fact {fact_id} is not active, so it has no patch; choose an active fact")
        return patch_file(self._ledger.patch_of(fact))

    @on_worker
    def proposal_patch(self, proposal_id: str) -> bytes:
        return patch_file(self.proposals.get(proposal_id).patch)

    @on_worker
    def ledger_file(self) -> bytes:
        return ledger_file(self._ledger)

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


def apply_to_valid(
    function: Callable[[list[Item]], Sequence[Result]], items: Sequence[Item | FactpatchError]
) -> list[Result | FactpatchError]:
    """Applies a function to a batch of those items that are not errors. Errors stay in their places."""
    valid = [item for item in items if not isinstance(item, FactpatchError)]
    results = iter(function(valid) if valid else [])
    return [item if isinstance(item, FactpatchError) else next(results) for item in items]
