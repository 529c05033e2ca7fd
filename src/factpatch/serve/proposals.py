"""Proposals: corrections that have been tried but not accepted. Only clients that know a proposal's id can see it."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from factpatch.errors import FactpatchError
from factpatch.facts import FactEdit, same
from factpatch.models.answers import Answer
from factpatch.patch import Patch
from factpatch.serve.limits import Limits


class UnknownError(FactpatchError):
    """A proposal or a fact that does not exist."""


@dataclass(frozen=True)
class Comparison:
    """The best answers to one question as the service answers now, and under the proposed patch."""

    question: str
    before: list[Answer]
    after: list[Answer]

    @property
    def changed(self) -> bool:
        return not same(self.before[0].text, self.after[0].text)


@dataclass(frozen=True)
class Control:
    """A question about something else: the unedited model's answer, and the answer under the patch."""

    question: str
    before: str
    after: str
    in_scope: bool  # whether the service would use the patch for this question

    @property
    def flipped(self) -> bool:
        return not same(self.before, self.after)


@dataclass(frozen=True)
class WeightChange:
    """The size of the change of one weight: the root mean square of its entries."""

    name: str
    size: float


@dataclass(frozen=True)
class Proposal:
    """A correction with its patch and everything that was measured about it."""

    edit: FactEdit
    patch: Patch
    question: Comparison
    paraphrases: list[Comparison]
    controls: list[Control]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def weights(self) -> list[WeightChange]:
        deltas = self.patch.deltas.items()
        return [WeightChange(name, float(delta.norm()) / math.prod(delta.shape) ** 0.5) for name, delta in deltas]

    @property
    def success(self) -> bool:
        return same(self.question.after[0].text, self.edit.a)


class Proposals:
    """The open proposals in memory. They expire, and the oldest make room for new ones."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock = limits, clock
        self._open: OrderedDict[str, tuple[float, Proposal]] = OrderedDict()  # id -> (expiry, proposal), oldest first
        self._bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._open)

    def put(self, proposal: Proposal) -> None:
        with self._lock:
            self._open[proposal.id] = (self._clock() + self._limits.proposal_seconds, proposal)
            self._bytes += proposal.patch.nbytes
            self._drop_old()

    def get(self, proposal_id: str) -> Proposal:
        with self._lock:
            self._drop_old()
            if proposal_id not in self._open:
                raise UnknownError("there is no such proposal; it may have expired, so propose the correction again")
            return self._open[proposal_id][1]

    def discard(self, proposal_id: str) -> Proposal:
        with self._lock:
            found = self.get(proposal_id)
            self._drop(proposal_id)
            return found

    def _drop_old(self) -> None:
        now, limits = self._clock(), self._limits
        for name, (expiry, _) in list(self._open.items()):
            full = len(self._open) > limits.proposals or self._bytes > limits.proposal_bytes
            if expiry > now and not (full and len(self._open) > 1):
                break
            self._drop(name)

    def _drop(self, proposal_id: str) -> None:
        _, dropped = self._open.pop(proposal_id)
        self._bytes -= dropped.patch.nbytes
