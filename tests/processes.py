"""Runs that are stopped, killed and resumed: helpers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stopped(Exception):
    pass


def stop_at(step: int) -> Callable[[Any], None]:
    """A watcher that ends the run, as a crash would, once it has come so far."""

    def watch(status: Any) -> None:
        if status.step >= step:
            raise Stopped

    return watch


def run_aside(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **options)


def wait_for(process: subprocess.Popen[str], folder: Path) -> None:
    """Until the first checkpoint is there."""
    while process.poll() is None and not any(folder.glob("step-*")):
        time.sleep(0.01)


def stopped_by_sigterm(command: list[Any], checkpoints: Path, after: float = 0.0, timeout: float = 30) -> str:
    """What a command of ours says, in its errors, that is asked to stop once its first checkpoint is there."""
    arguments = ["-m", "factpatch", *map(str, command)]
    with run_aside(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_for(process, checkpoints)
            time.sleep(after)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 1
    assert not out
    assert "Traceback" not in err
    return err


# Registered first, so run last: what a process still shares then can abort it, though not every time.
PARTED = """
import atexit, os, torch
atexit.register(lambda: torch.distributed.is_initialized() and os._exit(3))
"""


def run_in_two_processes(script: Path, *arguments: str, timeout: float = 90) -> str:
    """What the script prints when two processes run it together, and part at its end."""
    together = script.with_name("together.py")
    together.write_text(PARTED + script.read_text())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(together)]
    with run_aside([*launcher, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.terminate()  # the launcher then ends its processes too
    assert process.returncode == 0, err
    return out
