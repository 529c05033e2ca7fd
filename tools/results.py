"""Runs the experiments in tools/experiments and writes their results to docs/results: `make results`.

An experiment is a TOML file of steps. A step is one factpatch command, which writes one file or folder. A step is
skipped if its command, its `version` and the content of all files that it reads are the same as when it last ran.
A change of the package's code alone does not rerun a step, because most changes do not affect results and a rerun can
cost hours of GPU time: raise `version` after a change that does. `--dry-run` names the steps that were run by other
code. docs/results/README.md describes the format of the TOML files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiment import Experiment, Plan, Step, read_experiments
from result_pages import write_pages

from factpatch import __version__
from factpatch.errors import FactpatchError, FileError, InputError
from factpatch.files import atomic_file, content_hash

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130  # exit status after Ctrl-C
NO_MEMORY = "out of memory"  # in the error of a command
RESUMES_ITSELF = ("evaluate", "paraphrase", "revise")
RESUMES_ON_REQUEST = ("fit", "train")
Call = Callable[[Sequence[str], Path], str]


def call_factpatch(words: Sequence[str], log: Path) -> str:
    """Runs a command in a process of its own and returns what it prints to stdout. Its stderr goes to a log."""
    with log.open("a", encoding="utf-8") as stderr:
        command = [sys.executable, "-m", "factpatch", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    if done.returncode:
        lines = log.read_text(encoding="utf-8").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        raise FileError(f"exit status {done.returncode}: {reason[:300]} (log: {log})")
    return done.stdout


class Runner:
    """Runs the steps of a plan. What a step read and printed is recorded in a JSON file, its record."""

    def __init__(self, plan: Plan, call: Call = call_factpatch):
        self.plan = plan
        self.call = call
        self.outcomes: dict[str, str] = {}  # by step: skipped, done, failed, blocked; in a dry run also run, resume
        self.errors: dict[str, str] = {}  # by step that failed
        self.hashes: dict[Path, str] = {}

    def run_sharing(self, steps: Sequence[Step], jobs: int) -> None:
        """Runs up to `jobs` steps at a time. If memory ran out, those that failed are run again, one at a time."""
        self.run(steps, jobs)
        if jobs > 1 and any(NO_MEMORY in error for error in self.errors.values()):
            print("memory ran out; running the steps that failed again, one at a time", flush=True)
            self.outcomes.clear()
            self.errors.clear()
            self.run(steps)

    def run(self, steps: Sequence[Step], jobs: int = 1, dry: bool = False) -> None:
        """Runs steps after those that they need. The error of one step stops only the steps that need it."""
        sorter = TopologicalSorter({step.key: [need.key for need in self.plan.needs(step)] for step in steps})
        sorter.prepare()
        waiting: list[str] = []
        running: dict[Future[str], str] = {}
        with ThreadPoolExecutor(jobs) as pool:
            while sorter.is_active():
                waiting += sorted(sorter.get_ready(), key=list(self.plan.steps).index)
                while waiting and len(running) < jobs:
                    key = waiting.pop(0)
                    running[pool.submit(self._outcome, self.plan.steps[key], dry)] = key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    self.outcomes[key] = future.result()
                    sorter.done(key)
                    print(f"[{len(self.outcomes)}/{len(steps)}] {key}: {self._described(key)}", flush=True)

    def _outcome(self, step: Step, dry: bool) -> str:
        before = {self.outcomes[need.key] for need in self.plan.needs(step) if need.key in self.outcomes}
        if before & {"failed", "blocked"}:
            return "blocked"
        if before & {"run", "resume"}:
            return "run"
        try:
            return self._perform(step, dry)
        except FactpatchError as error:
            self.errors[step.key] = str(error)
            return "failed"

    def _perform(self, step: Step, dry: bool) -> str:
        chosen = self.chosen(step)
        words = self.plan.command(step, chosen)
        identity = self._identity(step, chosen)
        record, output = self.record(step), self.plan.path(step)
        same = record.get("identity") == identity
        if same and record["finished"] and output.exists():
            return "skipped"
        resumed = same and output.exists() and _can_resume(words[0], output)
        if dry:
            return "resume" if resumed else "run"
        if not resumed:
            _remove(output)
        about = {
            "step": step.key,
            "values": dict(step.values),
            "command": self.plan.shown(step, chosen),
            "identity": identity,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {"factpatch": __version__, **{name: version(name) for name in ("torch", "transformers")}},
            "seed": int(words[words.index("--seed") + 1]) if "--seed" in words else 0,
            "code": code_hash(),
            "resumed": resumed,
        }
        self._write(step, {**about, "finished": False})
        start = time.perf_counter()
        more = ["--resume"] if resumed and words[0] in RESUMES_ON_REQUEST else []
        printed = self.call([*words, *more, "--json"], self._file(step, ".log"))
        about |= {"seconds": time.perf_counter() - start, "output": self._hash(output, fresh=True)}
        self._write(step, {**about, "finished": True, **self._results(output, printed)})
        return "done"

    def chosen(self, step: Step) -> dict[str, str]:
        """Returns the values that a step takes from the best of the steps that its `best` names."""
        if step.best is None:
            return {}
        tried = self.plan.tried(step)
        scores = self._scores(tried, step.by)
        best = tried[scores.index(max(scores))]
        return {name: value for name, value in best.values.items() if name not in step.values}

    def _scores(self, tried: Sequence[Step], by: Sequence[str]) -> list[float]:
        """Returns the sum of the values in `by` for each candidate. Values that no candidate has are left out."""
        results = [self.record(step).get("result", {}) for step in tried]
        there = [key for key in by if any(result.get(key) is not None for result in results)]
        for step, result in zip(tried, results, strict=True):
            if missing := [key for key in there or by if result.get(key) is None]:
                raise InputError(f"the result of {step.key} has no {missing[0]} to choose by; change `by`")
        return [sum(result[key] for key in there) for result in results]

    def _identity(self, step: Step, chosen: dict[str, str]) -> dict[str, Any]:
        """Returns everything that a step's output depends on, but not the paths of data and models."""
        inputs = {need.key: self.record(need).get("output") for need in self.plan.reads(step)}
        inputs |= {name: self._hash(path) for name, path in self.plan.files(step, chosen).items()}
        return {"run": self.plan.text(step, chosen), "version": step.version, "inputs": dict(sorted(inputs.items()))}

    def _hash(self, path: Path, fresh: bool = False) -> str:
        """Returns the sha256 of a file, or of all files of a folder."""
        if fresh or path not in self.hashes:
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            parts = [f"{file.relative_to(path)} {content_hash(file)}" for file in files]
            self.hashes[path] = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self.hashes[path]

    def _results(self, output: Path, printed: str) -> dict[str, Any]:
        """Returns what a step printed, and its summary.json without these numbers. Local paths get general names."""
        found: dict[str, Any] = {"result": json.loads(printed.strip() or "{}")}
        if (output / "summary.json").is_file():
            summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
            found["summary"] = {key: value for key, value in summary.items() if key != "result"}
        return json.loads(self.plan.generalised(json.dumps(found)))

    def record(self, step: Step) -> dict[str, Any]:
        path = self._file(step, ".json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _write(self, step: Step, record: dict[str, Any]) -> None:
        with atomic_file(self._file(step, ".json")) as scratch:
            scratch.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _file(self, step: Step, ending: str) -> Path:
        return self.plan.path(step).parent / "steps" / f"{step.name}{ending}"

    def _described(self, key: str) -> str:
        step, outcome = self.plan.steps[key], self.outcomes[key]
        record = self.record(step)
        if outcome in ("run", "resume"):
            return f"{outcome}: {self.plan.shown(step)}"
        if outcome == "failed":
            return f"failed: {self.errors[key]}"
        if outcome == "skipped":
            return "unchanged" + ("" if record["code"] == code_hash() else ", but run by other code")
        if outcome == "blocked":
            return "blocked by a step that failed"
        keys = ("accuracy", "exact_match", "success", "retain", "equivalence", "equivalence_human")
        figures = [f"{key} {record['result'][key]:.3f}" for key in keys if record["result"].get(key) is not None]
        return ", ".join([f"done in {record['seconds']:,.0f} s", *figures])

    def publish(self, experiment: Experiment, folder: Path) -> None:
        """Copies the records of finished steps to docs/results/runs.

        Records of steps that do not exist any more, or whose last run failed, are removed.
        """
        folder = folder / experiment.name
        kept = [step for step in experiment.steps if self.outcomes.get(step.key) not in ("failed", "blocked")]
        for step in kept:
            if self.record(step).get("finished"):
                with atomic_file(folder / f"{step.name}.json") as scratch:
                    shutil.copyfile(self._file(step, ".json"), scratch)
        for stale in set(folder.glob("*.json")) - {folder / f"{step.name}.json" for step in kept}:
            stale.unlink()


def _can_resume(command: str, output: Path) -> bool:
    return command in RESUMES_ITSELF or (command in RESUMES_ON_REQUEST and (output / "checkpoint").is_dir())


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@cache
def machine() -> str:
    """Describes this machine: its GPU, if there is one, and the number of CPU cores."""
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().replace("\n", ", ")
    return ", ".join(filter(None, [gpu, f"{os.cpu_count()} CPU cores ({platform.machine()})"]))


@cache
def code_hash() -> str:
    """Returns the sha256 of the package's code without comments and docstrings."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and ast.get_docstring(node, clean=False) is not None:
                node.body.pop(0)
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def selected(plan: Plan, only: Sequence[str]) -> list[Step]:
    """Returns the steps of these experiments, or single steps such as fact-checking/model, and all that they need."""

    def with_needs(steps: Sequence[Step]) -> Iterator[Step]:
        for step in steps:
            yield from with_needs(plan.needs(step))
            yield step

    wanted = list(plan.steps.values())
    if only:
        names = [{step.experiment, f"{step.experiment}/{step.group}", step.key} for step in wanted]
        if unknown := set(only) - set().union(*names):
            raise InputError(f"no experiment or step is called {sorted(unknown)[0]}; --list shows their names")
        wanted = [step for step, own in zip(wanted, names, strict=True) if own & set(only)]
    return list({step.key: step for step in with_needs(wanted)}.values())


def main(arguments: Sequence[str] | None = None, call: Call = call_factpatch) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="run only these experiments or steps, and what they need"
    )
    parser.add_argument("--list", action="store_true", help="list the experiments and their steps")
    parser.add_argument("--dry-run", action="store_true", help="list what would be run, resumed and skipped")
    parser.add_argument("--pages", action="store_true", help="only write the tables again, from docs/results/runs")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="steps to run at the same time")
    parser.add_argument("--data", type=Path, default=Path("shared/data"), help="folder of fever, zsre and counterfact")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the pretrained models")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for what the steps write")
    parser.add_argument("--experiments", type=Path, default=ROOT / "tools" / "experiments", help="folder of TOML files")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages with tables")
    options = parser.parse_args(arguments)
    try:
        experiments = read_experiments(options.experiments)
        plan = Plan(experiments, options.data, options.models, options.work)
        steps = selected(plan, options.only)
        runner = Runner(plan, call)
        if options.list:
            for step in steps:
                print(step.key)
            return 0
        if options.dry_run:
            runner.run(steps, dry=True)
            return 0
        if not options.pages:
            runner.run_sharing(steps, options.jobs)
        for experiment in {step.experiment: experiments[step.experiment] for step in steps}.values():
            runner.publish(experiment, options.docs / "results" / "runs")
        write_pages(plan, experiments.values(), options.docs)
    except FactpatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; rerun the same command to resume", file=sys.stderr)
        return INTERRUPTED
    counts = {outcome: list(runner.outcomes.values()).count(outcome) for outcome in ("failed", "blocked")}
    if any(counts.values()):
        print(f"error: steps failed: {counts['failed']}, blocked: {counts['blocked']}; see above", file=sys.stderr)
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
