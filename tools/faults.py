"""Kills and disturbs factpatch's commands: `make faults`. Afterwards, a rerun must give the undisturbed result.

python tools/faults.py --rounds 20
python tools/faults.py --rounds 100 --faults kill --tasks revise evaluate

A disturbed command must end with a result, or with an error of one line; nothing may be half written.

- kill: SIGKILL at a random moment, up to three times in a row
- full: the disk is full, at a random number of bytes (a small tmpfs; without permission to mount one, a limit on the
  size of a file)
- refused: the output folder is not writable (root drops its override capability)
- cut: one of the input files is truncated at a random place
- twice: two processes write the same output at the same time
- lost: one of two processes of a distributed run is killed
- serve: the service is killed while facts are accepted
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

from fault_kinds import HANG, Ended, Failed, accept_facts, command_line, in_two_processes, obey_permissions, small_disk
from fault_tasks import Task, facts_in, named, prepare, tasks, written


class Harness:
    """Runs commands in forks of this process.

    It has imported everything, so that kills hit the work itself, not the imports.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.rng = random.Random(seed)
        self.given = folder / "given"
        self.log = folder / "log"
        self.numbers = iter(range(10**9))
        self.whole: dict[str, tuple[Any, float]] = {}  # by task: the undisturbed result and its seconds
        self.bytes: dict[str, int] = {}  # by task: the size of the undisturbed result

    def fork(self, work: Callable[[], object]) -> int:
        """Starts a fork that does this work, and returns its process id."""
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code = 70
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self, pid: int, kill_after: float | None = None) -> Ended:
        """Waits for a fork to end, or kills it after this many seconds."""
        limit = time.monotonic() + (HANG if kill_after is None else kill_after)
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() >= limit:
                os.kill(pid, signal.SIGKILL)
                found = os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        if kill_after is None and os.WIFSIGNALED(found[1]) and time.monotonic() >= limit:
            raise Failed("a command hangs")
        return Ended(os.waitstatus_to_exitcode(found[1]), self.log.read_text(errors="replace"))

    def run(self, task: Task, out: Path, kill_after: float | None = None, before: Callable[[], object] = int) -> Ended:
        """Runs the commands of a task in one fork."""

        def work() -> None:
            before()
            for command in task.commands(out):
                resumed = task.resumes and any((out / "run" / "checkpoint").glob("step-*"))
                command_line([*command, *(["--resume"] if resumed else [])])

        self.log.write_text("")
        self.log.chmod(0o666)
        return self.ended(self.fork(work), kill_after)

    def new_folder(self) -> Path:
        folder = self.folder / f"out-{next(self.numbers)}"
        folder.mkdir()
        return folder

    def undisturbed(self, task: Task) -> tuple[Any, float]:
        if task.name not in self.whole:
            out = self.new_folder()
            start = time.monotonic()
            if (ended := self.run(task, out)).code != 0:
                raise Failed(f"without a fault: {ended.text[-2000:]}")
            self.whole[task.name] = written(out), time.monotonic() - start
            self.bytes[task.name] = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            shutil.rmtree(out)
        return self.whole[task.name]

    def expect_whole(self, task: Task, out: Path) -> None:
        """Runs the task to its end and compares what is there with the undisturbed result."""
        ended = self.run(task, out).check()
        again = "in use" in ended.text or "exists" in ended.text  # the disturbed run had finished already
        if ended.code != 0 and not again:
            raise Failed(f"a rerun fails: {ended.text[-2000:]}")
        if (found := written(out)) != (expected := self.undisturbed(task)[0]):
            names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
            raise Failed(f"a rerun gives another result: {', '.join(names)}; {ended.text[-500:]}")

    # Faults

    def kill(self, task: Task) -> str:
        _, seconds = self.undisturbed(task)
        out = self.new_folder()
        kills = 0
        for _ in range(self.rng.randint(1, 3)):
            ended = self.run(task, out, self.rng.uniform(0, 0.9 * seconds)).check()
            kills += ended.code == -signal.SIGKILL
            if ended.code == 0:
                break
        self.expect_whole(task, out)
        return f"{kills} kills"

    def full(self, task: Task) -> str:
        self.undisturbed(task)
        out = self.new_folder()
        with small_disk(out, int(self.bytes[task.name] ** self.rng.uniform(0.5, 1))) as before:
            ended = self.run(task, out, before=before).check()
            if ended.code == 1 and not any(word in ended.text for word in ("No space", "too large", "full", "disk")):
                raise Failed(f"the error does not say that the disk is full: {ended.text[-1000:]}")
            left = self.folder / "left"
            shutil.copytree(out, left, symlinks=True)
        out.rmdir()
        left.rename(out)
        self.expect_whole(task, out)
        return "full" if ended.code else "enough space"

    def refused(self, task: Task) -> str:
        self.undisturbed(task)
        out = self.new_folder()
        out.chmod(0o555)
        ended = self.run(task, out, before=obey_permissions).check()
        if ended.code != 1 or list(out.iterdir()):
            raise Failed(f"exit status {ended.code}, {list(out.iterdir())}: {ended.text[-1000:]}")
        out.chmod(0o755)
        self.expect_whole(task, out)
        return "refused"

    def cut(self, task: Task) -> str:
        if not task.inputs:
            return "skipped: reads no file"
        self.undisturbed(task)
        named_ = [self.given / name for name in task.inputs]
        files = [file for path in named_ for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        file = self.rng.choice(files)
        content = file.read_bytes()
        out = self.new_folder()
        try:
            file.write_bytes(content[: self.rng.randrange(len(content))])
            ended = self.run(task, out).check()
        finally:
            file.write_bytes(content)
        if ended.code == 0:  # a shorter file is still valid
            return "read"
        shutil.rmtree(out)
        out.mkdir()
        self.expect_whole(task, out)
        return "an error"

    def twice(self, task: Task) -> str:
        _, seconds = self.undisturbed(task)
        out = self.new_folder()
        self.log.write_text("")

        def work() -> None:
            for command in task.commands(out):
                command_line(command)

        first = self.fork(work)
        time.sleep(self.rng.uniform(0, seconds))
        second = self.fork(work)
        codes = [self.ended(pid).check().code for pid in (first, second)]
        self.expect_whole(task, out)
        return f"{codes.count(0)} of 2 succeed"

    def lost(self, task: Task) -> str:
        if not task.distributed:
            return "skipped: runs in one process"
        if (key := f"{task.name} in two processes") not in self.whole:
            out = self.new_folder()
            start = time.monotonic()
            if (ended := in_two_processes(task, out)).code:
                raise Failed(f"without a fault: {ended.text[-2000:]}")
            self.whole[key] = written(out), time.monotonic() - start
        expected, seconds = self.whole[key]
        out = self.new_folder()
        lost = in_two_processes(task, out, self.rng.uniform(0.3, 0.7) * seconds, self.rng.randrange(2))
        if lost.code and (ended := in_two_processes(task, out)).code and "in use" not in ended.text:
            raise Failed(f"a rerun fails: {ended.text[-2000:]}")
        if (found := written(out)) != expected:
            names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
            raise Failed(f"a rerun gives another result: {', '.join(names)}")
        return "one process lost" if lost.code else "finished before"

    def serve(self, task: Task) -> str:
        """Kills the service between or during requests; the task, `ledger`, only supplies facts."""
        if task.name != "ledger":
            return "skipped: only with the ledger's facts"
        ledger = self.new_folder() / "facts.db"
        command = [sys.executable, "-m", "factpatch", "serve", "--model", "world", "--editor", "world", "--json"]
        log = self.log.open("w")
        process = subprocess.Popen(
            [*command, "--ledger", ledger, "--port", "0"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        killer = threading.Timer(self.rng.uniform(0.1, 4), process.kill)
        killer.start()
        sent, confirmed = accept_facts(url, self.given / "facts.jsonl")
        killer.join()
        process.communicate()
        log.close()
        found = {(x, target) for _, x, target, status in facts_in(ledger) if status == "active"}
        if not confirmed <= found <= sent or "Traceback" in self.log.read_text():
            raise Failed(f"confirmed {len(confirmed)}, recorded {len(found)}; {self.log.read_text()[-1000:]}")
        return "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("kill", "full", "refused", "cut", "twice", "lost", "serve")
    parser.add_argument("--rounds", type=int, default=5, help="of each fault for each task")
    parser.add_argument("--faults", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        harness = Harness(Path(folder), options.seed)
        harness.given.mkdir()
        harness.log.write_text("")
        patches = not options.tasks or bool({"merge", "apply", "adapter", "ledger"} & set(options.tasks))
        if (ended := harness.ended(harness.fork(lambda: prepare(harness.given, patches=patches)))).code:
            raise SystemExit(ended.text)
        import_everything()
        for task in named(options.tasks, tasks(harness.given)):
            for fault in options.faults:
                for number in range(options.rounds):
                    try:
                        found = getattr(harness, fault)(task)
                    except Failed as error:
                        found = "FAILED"
                        failures.append(f"{task.name}, {fault}, round {number}: {error}")
                        print(failures[-1], file=sys.stderr)
                    counts[f"{task.name}, {fault}: {found}"] += 1
                    print(f"{task.name}, {fault}: {found}", file=sys.stderr)
                    for out in Path(folder).glob("out-*"):
                        shutil.rmtree(out)
                    if found.startswith("skipped"):
                        break
    print(json.dumps({"counts": dict(sorted(counts.items())), "failures": len(failures)}, indent=1))
    sys.exit(bool(failures))


def import_everything() -> None:
    """Imports what the commands need, so that a fork starts to work at once."""
    import torch

    import factpatch.cli
    import factpatch.data.paraphrase
    import factpatch.data.revise
    import factpatch.demo
    import factpatch.evaluation
    import factpatch.report
    import factpatch.training  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
