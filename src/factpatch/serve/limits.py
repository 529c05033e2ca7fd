"""Limits that keep the service responsive: sizes, the queue, the rate of requests, and what proposals may hold."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

from factpatch.errors import InputError

QUESTION_CHARS, ANSWER_CHARS, NOTE_CHARS = 500, 200, 500
PARAPHRASES = 10  # per proposal
HEAD_BYTES, HEAD_SECONDS = 16 << 10, 10  # for the first line and headers of a request
BODY_BYTES, BODY_SECONDS = 64 << 10, 30
CONNECTIONS = 1000  # maximum open at the same time


@dataclass(frozen=True)
class Limits:
    """The limits that depend on how many people use the service."""

    queue: int = 256  # maximum number of waiting requests
    requests_per_minute: int = 600  # per client address
    proposals: int = 1000  # maximum open at the same time
    proposal_bytes: int = 256 << 20  # maximum total size of the open proposals' patches
    proposal_seconds: float = 1800  # after which an open proposal expires

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise InputError(f"{field.name} must be above 0, found {getattr(self, field.name)}")


class RateLimiter:
    """A token bucket per client, which holds a minute's requests and refills evenly. Tracks only recent clients."""

    CLIENTS = 10_000

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self.per_minute, self.clock = per_minute, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (tokens left, when)
        self._lock = threading.Lock()

    def wait(self, client: str) -> float:
        """Counts one request. Returns 0 if it is allowed, otherwise the seconds until the next one is."""
        now = self.clock()
        with self._lock:
            tokens, then = self._buckets.pop(client, (float(self.per_minute), now))
            tokens = min(float(self.per_minute), tokens + (now - then) * self.per_minute / 60)
            allowed = tokens >= 1
            self._buckets[client] = (tokens - allowed, now)
            while len(self._buckets) > self.CLIENTS:
                self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) * 60 / self.per_minute
