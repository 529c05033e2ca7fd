"""Disturbing processes: full disks, missing permissions, lost processes and services."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from fault_tasks import Task
from fault_world import build

HANG = 900  # seconds after which a command counts as hanging


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # negative for a signal
    text: str  # what it wrote to stdout and stderr

    def check(self) -> Ended:
        """Fails unless this is a result, an error of one line, or a kill of ours."""
        if "Traceback" in self.text or self.code not in (0, 1, -signal.SIGKILL):
            raise Failed(f"exit status {self.code}: {self.text[-2000:]}")
        return self


class Failed(Exception):
    """A fault that the commands did not handle."""


def accept_facts(url: str, facts: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Proposes and accepts facts until the service is gone. Returns those that were sent and those confirmed."""
    sent: set[tuple[str, str]] = set()
    confirmed: set[tuple[str, str]] = set()
    with suppress(httpx.HTTPError), httpx.Client(base_url=f"{url}/api/", timeout=60) as client:
        for line in facts.read_text().splitlines():
            fact = json.loads(line)
            question, target = fact["input"], fact["target"]
            proposal = client.post("propose", json={"question": question, "target": target}).raise_for_status().json()
            if proposal["success"]:
                sent.add((question, target))
                client.post("accept", json={"id": proposal["id"]}).raise_for_status()
                confirmed.add((question, target))
    return sent, confirmed


def in_two_processes(task: Task, out: Path, kill_after: float | None = None, which: int = 0) -> Ended:
    """Runs a task in two processes that share the work, one of which is killed after so many seconds."""
    (command,) = task.commands(out)
    resumed = task.resumes and any((out / "run" / "checkpoint").glob("step-*"))
    arguments = [str(part) for part in [*command, *(["--resume"] if resumed else [])]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*launcher, "factpatch", *arguments], stdout=log, stderr=log)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(HANG if kill_after is None else kill_after)
            workers = psutil.Process(process.pid).children() if process.returncode is None else []
            if which < len(workers):
                workers[which].kill()
            process.wait(HANG)
        finally:
            process.kill()
        log.seek(0)
        own, *_ = log.read().partition("torch/distributed/elastic")  # what follows is the launcher's report
        return Ended(process.returncode, own)


def command_line(arguments: list[Any]) -> None:
    """Runs one command of factpatch, or a stage of the embedded world's build. Raises SystemExit if it fails."""
    from factpatch.cli import main

    if arguments[0] == "make_world":
        build(*arguments[1:], command_line)
        return
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        if stop.code:
            raise


def obey_permissions() -> None:
    """Gives up the capabilities with which root reads and writes everything, CAP_DAC_OVERRIDE and the next one."""
    if os.getuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
        words = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of capabilities 0 to 31 and 32 to 63
        libc = ctypes.CDLL(None, use_errno=True)
        libc.capget(header, words)
        words[0] &= ~0b110
        if libc.capset(header, words):
            raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def small_disk(folder: Path, size: int) -> Any:
    """Gives a folder a file system of this size. Yields what a process must call first, if that is not possible."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        yield limit
        return
    try:
        yield int
    finally:
        subprocess.run(["umount", str(folder)], check=True)
