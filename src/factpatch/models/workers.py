"""Work on long lists of texts in several processes: tokenizers written in Python keep a GPU waiting otherwise."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SLICE = 1000  # texts that one process takes at a time
WORTH_IT = 20 * SLICE  # below, starting processes takes longer than it saves

_work: Callable[..., list[Any]]  # of a process started here


class Workers(Generic[T]):
    """`work(texts, ...)`, one result a text, shared among processes where there are many texts and cores to spare.

    Processes are started when there is enough to do for the first time, and stay. Copies start their own.
    """

    def __init__(self, work: Callable[..., list[T]], processes: int | None = None):
        self.work = work
        self.spare = min(8, (os.cpu_count() or 1) - 2) if processes is None else processes
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, texts: Sequence[str], *settings: Any) -> list[T]:
        if self.spare < 2 or len(texts) < WORTH_IT or sys.platform != "linux":
            return self.work(texts, *settings)
        # Forked, so that what the work needs, such as a tokenizer, need not travel.
        self.pool = self.pool or ProcessPoolExecutor(self.spare, get_context("fork"), _begin, (self.work, os.getpid()))
        slices = [texts[start : start + SLICE] for start in range(0, len(texts), SLICE)]
        try:
            parts = list(self.pool.map(_do, slices, *([setting] * len(slices) for setting in settings)))
        except BrokenProcessPool:  # one was killed, for its memory perhaps
            self.pool = None
            return self.work(texts, *settings)
        return [result for part in parts for result in part]

    def __reduce__(self) -> tuple[Any, ...]:
        return Workers, (self.work, self.spare)


def _begin(work: Callable[..., list[Any]], parent: int) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """What is killed leaves no processes behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _do(texts: Sequence[str], *settings: Any) -> list[Any]:
    return _work(texts, *settings)
