"""The parts of the service: its queue, its limits, its memory of proposals, its questions and its HTML."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from factpatch.deltas import Dense
from factpatch.errors import FactpatchError, InputError
from factpatch.facts import FactEdit
from factpatch.ledger_store import Fact
from factpatch.models.answers import Answer
from factpatch.patch import Patch
from factpatch.serve import html
from factpatch.serve.answering import Answered
from factpatch.serve.limits import Limits, RateLimiter
from factpatch.serve.proposals import Comparison, Control, Proposal, Proposals, UnknownError
from factpatch.serve.questions import Questions, world_questions
from factpatch.serve.run import check_exposure
from factpatch.serve.service import Check
from factpatch.serve.worker import BusyError, Handler, Worker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Held:
    """A worker whose thread is busy until `release`, so that requests pile up."""

    def __init__(self, limit: int = 100):
        self.worker = Worker(limit)
        self.go_on = threading.Event()
        started = threading.Event()
        self.worker.call(lambda: (started.set(), self.go_on.wait(60)))
        started.wait(60)


def test_waiting_requests_are_handled_together_in_groups() -> None:
    groups: list[list[int]] = []

    def double(requests: list[int]) -> list[int]:
        groups.append(requests)
        return [2 * request for request in requests]

    held = Held()
    handler = Handler(double, batch_size=3)
    futures = [held.worker.submit(handler, number) for number in range(7)]
    held.go_on.set()
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8, 10, 12]
    assert groups == [[0, 1, 2], [3, 4, 5], [6]]
    held.worker.close()


def test_an_error_fails_its_own_request_only() -> None:
    def divide(requests: list[int]) -> list[float]:
        return [12 / request for request in requests]

    held = Held()
    handler = Handler(divide, batch_size=3)
    good, bad, last = (held.worker.submit(handler, number) for number in (3, 0, 4))
    held.go_on.set()
    assert (good.result(), last.result()) == (4, 3)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    held.worker.close()


def test_urgent_requests_get_every_second_turn() -> None:
    order: list[str] = []

    def log(name: str, urgent: bool) -> Handler[int, int]:
        def run(requests: list[int]) -> list[int]:
            order.append(name)
            return requests

        return Handler(run, batch_size=1, urgent=urgent)

    slow, other, urgent = log("slow", False), log("other", False), log("urgent", True)
    held = Held()
    futures = [held.worker.submit(handler, 0) for handler in (slow, slow, other, urgent, urgent, urgent, urgent)]
    held.go_on.set()
    held.worker.close()
    assert all(future.done() for future in futures), "closing finishes what is waiting"
    assert order == ["urgent", "slow", "urgent", "slow", "urgent", "other", "urgent"]


def test_errors_reach_only_those_they_concern() -> None:
    def odd_only(requests: list[int]) -> Sequence[int | FactpatchError]:
        return [request if request % 2 else InputError("even") for request in requests]

    held = Held()
    handler = Handler(odd_only, batch_size=10)
    futures = [held.worker.submit(handler, number) for number in range(3)]
    broken = held.worker.call(lambda: 1 // 0)
    dropped = held.worker.call(lambda: 1)
    dropped.cancel()
    held.go_on.set()
    assert [type(future.exception()) for future in futures] == [InputError, type(None), InputError]
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert held.worker.call(lambda: 5).result() == 5, "the thread goes on"
    held.worker.close()


def test_the_queue_is_limited() -> None:
    held = Held(limit=3)
    waiting = [held.worker.call(lambda: 1) for _ in range(2)]
    with pytest.raises(BusyError):
        held.worker.call(lambda: 1)
    held.go_on.set()
    assert [future.result() for future in waiting] == [1, 1]
    assert held.worker.call(lambda: 2).result() == 2, "there is room again"
    held.worker.close()


def test_each_client_has_its_own_rate() -> None:
    clock = Clock()
    rate = RateLimiter(60, clock)
    assert [rate.wait("a") for _ in range(60)] == [0.0] * 60
    assert rate.wait("a") == pytest.approx(1.0)
    assert rate.wait("b") == 0.0
    clock.now += 1.5
    assert [rate.wait("a") == 0.0 for _ in range(2)] == [True, False]
    for number in range(2 * RateLimiter.CLIENTS):
        rate.wait(str(number))
    assert len(rate._buckets) == RateLimiter.CLIENTS


def proposal(x: str = "Who?", size: int = 4, flips: bool = True, in_scope: bool = False) -> Proposal:
    edit = FactEdit(x, "new", "old")
    patch = Patch({"encoder.layers.0.fc1.weight": Dense(torch.ones(1, size))}, "base", "test", (edit,))
    own = Comparison(x, [Answer("old", 0.9)], [Answer("new", 0.8), Answer("old", 0.1)])
    control = Control("What else?", "same", "other" if flips else "same", in_scope)
    return Proposal(edit, patch, own, [replace(own, question="Whom?")], [control])


def test_proposals_expire() -> None:
    clock = Clock()
    proposals = Proposals(Limits(proposal_seconds=10), clock)
    old, new = proposal(), proposal()
    proposals.put(old)
    clock.now = 6
    proposals.put(new)
    assert proposals.get(old.id) is old
    clock.now = 11
    with pytest.raises(UnknownError, match="may have expired"):
        proposals.get(old.id)
    assert proposals.discard(new.id) is new
    assert len(proposals) == 0


@pytest.mark.parametrize("limits", [Limits(proposals=3), Limits(proposal_bytes=3 * 16)])
def test_the_memory_of_proposals_is_bounded(limits: Limits) -> None:
    proposals = Proposals(limits)
    made = [proposal() for _ in range(10)]
    for one in made:
        proposals.put(one)
    assert len(proposals) == 3
    assert proposals.get(made[-1].id) is made[-1]
    with pytest.raises(UnknownError):
        proposals.get(made[0].id)


def test_limits_must_be_positive() -> None:
    with pytest.raises(InputError, match="queue must be above 0"):
        Limits(queue=0)


def test_known_questions_keep_their_spelling() -> None:
    questions = world_questions()
    usual = "What is the capital of Burundi?"
    assert questions.spell(" what is the CAPITAL of burundi") == usual
    assert questions.spell(" who painted my kitchen") == "who painted my kitchen"
    wordings = questions.other_wordings(usual)
    assert usual not in wordings
    assert wordings[0] == "May I ask you for the capital of Burundi?"
    assert questions.other_wordings("Who painted my kitchen?") == []
    assert questions.examples[0].question == usual


def test_control_questions_leave_out_other_wordings_of_the_same_question() -> None:
    questions = Questions([["a?", "aa?"], ["b?", "bb?"], ["c?"]], ["a?", "b?", "c?"])
    assert questions.controls_besides(["AA", "x"]) == ["b?", "c?"]
    assert questions.controls_besides(["c"]) == ["a?", "b?"]


@pytest.mark.parametrize(("host", "token"), [("0.0.0.0", None), ("example.org", None), ("127.0.0.1", "short")])
def test_other_machines_need_a_token_that_is_hard_to_guess(host: str, token: str | None) -> None:
    with pytest.raises(InputError, match="token"):
        check_exposure(host, token)


@pytest.mark.parametrize(
    ("host", "token"), [("127.0.0.1", None), ("localhost", None), ("::1", None), ("0.0.0.0", "x" * 16)]
)
def test_this_machine_needs_none(host: str, token: str | None) -> None:
    check_exposure(host, token)


EVIL = "<script>alert('${1}')</script>{{x}}"


def test_texts_are_escaped() -> None:
    fact = Fact(1, EVIL, EVIL, EVIL, (EVIL,), EVIL, "2026-11-16", "active")
    comparison = Comparison(EVIL, [Answer(EVIL, 0.5)], [Answer(EVIL, 0.5)])
    edit = FactEdit(EVIL, EVIL, EVIL)
    evil = Proposal(edit, proposal().patch, comparison, [comparison], [Control(EVIL, EVIL, "other", True)])
    shown = [
        html.answered(Answered(EVIL, [Answer(EVIL, 0.5)], fact)),
        html.proposal(evil),
        html.facts([fact], EVIL),
        html.facts([], EVIL),
        html.check(Check([], [fact], 3, 2)),
        html.message(EVIL),
    ]
    assert not [text for text in shown if "<script" in text]


def test_the_best_answer_comes_first_and_the_others_by_probability() -> None:
    answers = [Answer("best", 0.2), Answer("third", 0.1), Answer("second", 0.3)]  # a beam search ranks by length too
    shown = html.answered(Answered("Who?", answers, None))
    assert shown.index("best") < shown.index("second") < shown.index("third")


def test_flips_are_marked() -> None:
    kept_here = html.proposal(proposal(in_scope=False))
    assert "1 of 1 keep their answers" in kept_here
    assert "would change 1," in kept_here
    lost = html.proposal(proposal(in_scope=True))
    assert "0 of 1 keep their answers" in lost
    assert "✗ changes" in lost
    assert "change none of them" in html.proposal(proposal(flips=False))
    assert "It works" in lost
    failed = replace(proposal(), edit=FactEdit("Who?", "another", "old"))
    assert "It does not work" in html.proposal(failed)
