"""Helpers for runs that are stopped, killed and resumed, and for several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


class Stopped(Exception):
    pass


def stop_at(step: int) -> Callable[[Any], None]:
    """A watcher that ends the run at a step, as a crash would."""

    def watch(status: Any) -> None:
        if status.step >= step:
            raise Stopped

    return watch


def run_aside(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **options)


def forked(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Runs a function in a copy of this process, which saves the seconds that imports take.

    The function must not compute gradients: on a machine with a GPU, torch cannot do that in a copy.
    """
    process = get_context("fork").Process(target=work, args=arguments, daemon=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()
    return process


HANG = 1800  # seconds after which a test gives up; a busy machine may need many times what an idle one does


def wait_for(process: subprocess.Popen[str] | BaseProcess, condition: Callable[[], object]) -> None:
    """Waits until the condition holds or the process has ended."""
    ended = (lambda: process.exitcode) if isinstance(process, BaseProcess) else process.poll
    while ended() is None and not condition():
        time.sleep(0.01)


def last_step(checkpoints: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)


def stopped_by_sigterm(command: list[Any], checkpoints: Path) -> str:
    """Runs a command, asks it to stop once it has made a few steps, and returns what it writes to stderr."""
    arguments = ["-m", "factpatch", *map(str, command)]
    with run_aside(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_for(process, lambda: last_step(checkpoints) > 0)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode == 1
    assert not out
    assert "Traceback" not in err
    return err


# Registered first, so called last. A process that is still connected to others then may or may not be aborted; this
# makes it fail every time.
PARTED = """
import atexit, os, torch
atexit.register(lambda: torch.distributed.is_initialized() and os._exit(3))
"""


def run_in_two_processes(script: Path, *arguments: str) -> str:
    """What the script prints when two processes run it together."""
    together = script.with_name("together.py")
    together.write_text(PARTED + script.read_text())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(together)]
    with run_aside([*launcher, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=HANG)
        finally:
            process.terminate()  # the launcher then ends its processes too
    assert process.returncode == 0, err
    return out
