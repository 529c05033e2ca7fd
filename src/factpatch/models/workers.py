"""Work on long lists of texts in several processes: tokenizers written in Python keep a GPU waiting otherwise."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SLICE = 1000  # texts that one process takes at a time
WORTH_IT = 20 * SLICE  # below, starting processes takes longer than it saves
DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG: what is killed leaves no processes behind

_work: Callable[..., list[Any]]  # of a process started here


class Workers(Generic[T]):
    """`work(texts, ...)`, one result a text, shared among processes where there are many texts and cores to spare.

    Processes are started when there is enough to do for the first time, and stay.
    """

    def __init__(self, work: Callable[..., list[T]], processes: int | None = None):
        self.work = work
        self.spare = min(8, (os.cpu_count() or 1) - 2) if processes is None else processes
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, texts: Sequence[str], *settings: Any) -> list[T]:
        if self.spare < 2 or len(texts) < WORTH_IT or sys.platform != "linux":
            return self.work(texts, *settings)
        # Forked, so that what the work needs, such as a tokenizer, need not travel.
        self.pool = self.pool or ProcessPoolExecutor(self.spare, get_context("fork"), _begin, (self.work,))
        slices = [texts[start : start + SLICE] for start in range(0, len(texts), SLICE)]
        parts = self.pool.map(_do, slices, *([setting] * len(slices) for setting in settings))
        return [result for part in parts for result in part]


def _begin(work: Callable[..., list[Any]]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _do(texts: Sequence[str], *settings: Any) -> list[Any]:
    return _work(texts, *settings)
