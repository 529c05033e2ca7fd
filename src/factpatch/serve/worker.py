"""One thread that runs everything that needs the model or the ledger, and handles similar requests together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from factpatch.errors import FactpatchError

Request = TypeVar("Request")
Result = TypeVar("Result")


class BusyError(FactpatchError):
    """Too many requests are waiting already."""


@dataclass(frozen=True, eq=False)
class Handler(Generic[Request, Result]):
    """Handles requests of one kind, up to `batch_size` together.

    An error among the results fails only its request. If `run` raises, it is called again for each request alone, so it
    must not have side effects, unless `batch_size` is 1.
    """

    run: Callable[[list[Request]], Sequence[Result | FactpatchError]]
    batch_size: int
    urgent: bool = False  # urgent requests get every second turn, so that they never wait for several slow ones


@dataclass(frozen=True, eq=False)
class _Job:
    handler: Handler[Any, Any]
    request: Any
    future: Future[Any]


class Worker:
    """Runs requests in one thread: the oldest first, together with waiting requests of the same kind."""

    def __init__(self, limit: int):
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free = threading.BoundedSemaphore(limit)  # places for requests that are not finished yet
        self._thread = threading.Thread(target=self._loop, name="factpatch-worker", daemon=True)
        self._thread.start()

    def submit(self, handler: Handler[Request, Result], request: Request) -> Future[Result]:
        """Queues a request. Raises a BusyError if too many are waiting."""
        if not self._free.acquire(blocking=False):
            raise BusyError("the service is busy; try again in a few seconds")
        job = _Job(handler, request, Future())
        job.future.add_done_callback(lambda _: self._free.release())
        self._queue.put(job)
        return job.future

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Queues a function that is run on its own."""
        return self.submit(Handler(lambda _: [function()], batch_size=1), None)

    def close(self, last: Callable[[], object] = lambda: None) -> None:
        """Finishes the waiting requests, calls `last` and ends the thread."""
        self._last = last
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        waiting: list[_Job] = []
        was_urgent = closing = False
        while waiting or not closing:
            arrived = self._arrived(block=not waiting)
            closing = closing or None in arrived
            waiting += [job for job in arrived if job is not None]
            if not waiting:
                continue
            preferred = [job for job in waiting if job.handler.urgent != was_urgent]
            handler = (preferred or waiting)[0].handler
            was_urgent = handler.urgent
            group = [job for job in waiting if job.handler is handler][: handler.batch_size]
            waiting = [job for job in waiting if job not in group]
            _run(handler, [job for job in group if job.future.set_running_or_notify_cancel()])
        self._last()

    def _arrived(self, block: bool) -> list[_Job | None]:
        arrived = [self._queue.get()] if block else []
        while True:
            try:
                arrived.append(self._queue.get_nowait())
            except queue.Empty:
                return arrived


def _run(handler: Handler[Any, Any], group: list[_Job]) -> None:
    if not group:
        return
    try:
        results = handler.run([job.request for job in group])
    except Exception as error:  # any error is reported to the client, and the thread continues
        if len(group) > 1:  # retry one by one, so that one bad request does not fail the others
            for job in group:
                _run(handler, [job])
            return
        results = [error]
    for job, result in zip(group, results, strict=True):
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
