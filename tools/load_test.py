"""Measures `factpatch serve` under load: many clients ask, some propose and accept, then the service is killed.

python tools/load_test.py --seconds 60 --clients 50 --proposers 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx
import psutil

from factpatch import world
from factpatch.facts import same

MANY = 1_000_000  # requests per minute: all clients have the same address here
WAIT = 60.0  # seconds after which a request counts as an error


@dataclass
class Record:
    """The measurements and errors of all clients."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MB, once per second
    accepted: dict[int, tuple[str, str]] = field(default_factory=dict)  # facts by id, as the service confirmed them
    tried: set[tuple[str, str]] = field(default_factory=set)  # question and target of everything ever sent to accept
    asked: int = 0
    changed: list[str] = field(default_factory=list)  # answers about facts that nobody changed
    cpu_seconds: float = 0.0  # of the service
    machine_load: list[float] = field(default_factory=list)  # running processes of the whole machine, once per second


class Client:
    """A connection to the service. It needs little CPU time, because the clients share the machine with the service."""

    def __init__(self, url: str, record: Record):
        self.host, self.port = url.removeprefix("http://").split(":")
        self.record = record

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self.host, int(self.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, kind: str, **sent: Any) -> dict[str, Any] | None:
        """Posts to the API. Returns the answer, or records an error and returns None."""
        start = time.perf_counter()
        try:
            status, body = await asyncio.wait_for(self._post(f"/api/{kind}", json.dumps(sent).encode()), WAIT)
        except (OSError, EOFError, TimeoutError) as error:
            self.record.errors.append(f"{kind}: {type(error).__name__}")
            self.writer.close()
            return None
        if status != 200:
            self.record.errors.append(f"{kind}: status {status} {body[:200]!r}")
            return None
        self.record.seconds[kind].append(time.perf_counter() - start)
        return json.loads(body)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {"Host": self.host, "Content-Type": "application/json", "Content-Length": len(body)}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
        return int(first.split()[1]), await self.reader.readexactly(length)


async def asker(url: str, record: Record, facts: list[world.Fact], seed: int, end: float) -> None:
    """Asks about facts that nobody changes, so their answers must stay the same."""
    rng = random.Random(seed)
    async with Client(url, record) as client:
        while time.perf_counter() < end and not client.writer.is_closing():
            fact = rng.choice(facts)
            found = await client.send("ask", question=rng.choice(fact.questions))
            if found is not None:
                record.asked += 1
                if not same(answer := found["answers"][0]["text"], fact.answer):
                    source = found["fact"]["x"] if found["fact"] else "the unedited model"
                    record.changed.append(f"{found['question']} {answer} (from {source})")


async def proposer(url: str, record: Record, facts: list[world.Fact], seed: int, end: float) -> None:
    """Proposes wrong answers to facts of its own, accepts two of three, and discards the others."""
    rng = random.Random(seed)
    async with Client(url, record) as client:
        for fact in facts:
            if time.perf_counter() >= end or client.writer.is_closing():
                return
            target = rng.choice([one.answer for one in world.facts() if one.relation == fact.relation])
            if not same(target, fact.answer):
                await correct(client, record, fact.questions[0], target, keep=rng.random() < 2 / 3)


async def correct(client: Client, record: Record, question: str, target: str, keep: bool) -> None:
    """Proposes one correction, and accepts or discards it."""
    proposal = await client.send("propose", question=question, target=target)
    if proposal is None or not proposal["success"]:
        return
    await expect(client, record, question, proposal["question"]["before"][0]["text"], "it was only proposed")
    if not keep:
        await client.send("discard", id=proposal["id"])
        return
    record.tried.add((question, target))
    accepted = await client.send("accept", id=proposal["id"])
    if accepted is not None:
        record.accepted[accepted["id"]] = (question, target)
        await expect(client, record, question, target, "it was accepted")


async def expect(client: Client, record: Record, question: str, answer: str, why: str) -> None:
    """Asks a question like any other client, and records an unexpected answer as an error."""
    found = await client.send("ask", question=question)
    if found is not None and not same(found["answers"][0]["text"], answer):
        record.errors.append(f"{question}: {why}, so expected {answer}, found {found['answers'][0]['text']}")


async def watch(process: psutil.Process, record: Record, end: float) -> None:
    before = process.cpu_times()
    while time.perf_counter() < end:
        record.memory.append(process.memory_info().rss / 1e6)
        record.machine_load.append(os.getloadavg()[0])
        await asyncio.sleep(1)
    after = process.cpu_times()
    record.cpu_seconds = after.user + after.system - before.user - before.system


async def load(url: str, process: psutil.Process, record: Record, options: argparse.Namespace) -> None:
    facts = random.Random(options.seed).sample(world.facts(), len(world.facts()))
    own, rest = facts[: len(facts) // 2], facts[len(facts) // 2 :]
    end = time.perf_counter() + options.seconds
    tasks = [proposer(url, record, own[n :: options.proposers], n, end) for n in range(options.proposers)]
    tasks += [asker(url, record, rest, n, end) for n in range(options.proposers, options.clients)]
    await asyncio.gather(watch(process, record, end), *tasks)


def start(ledger: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "factpatch", "serve", "--model", "world", "--editor", "world", "--json"]
    command += ["--ledger", str(ledger), "--port", "0", "--rate", str(MANY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def recorded(url: str) -> set[tuple[str, str]]:
    answer = httpx.get(f"{url}/api/facts", timeout=WAIT).raise_for_status()
    return {(fact["x"], fact["target"]) for fact in answer.json()["facts"]}


async def load_then_kill(url: str, process: subprocess.Popen[str], options: argparse.Namespace) -> Record:
    """Puts load on the service for a few more seconds and kills it; facts that it had confirmed must survive."""
    record = Record()
    short = argparse.Namespace(**{**vars(options), "seconds": 5, "seed": options.seed + 1})

    async def kill() -> None:
        await asyncio.sleep(4)
        process.kill()

    await asyncio.gather(load(url, psutil.Process(), record, short), kill())
    return record


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--proposers", type=int, default=5, help="clients that propose and accept; the others ask")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        ledger, record = Path(folder) / "facts.db", Record()
        process, url = start(ledger)
        try:
            asyncio.run(load(url, psutil.Process(process.pid), record, options))
            found = recorded(url)
            check = httpx.post(f"{url}/api/facts/verify", timeout=WAIT).json()
            consistent = found == set(record.accepted.values())
            later = asyncio.run(load_then_kill(url, process, options))
            process, url = start(ledger)
            confirmed = {*record.accepted.values(), *later.accepted.values()}
            after_kill = recorded(url)
            survived = {x for x, _ in confirmed} <= {x for x, _ in after_kill}
            unseen = after_kill <= record.tried | later.tried  # nothing that was only proposed
        finally:
            process.kill()
            process.wait()
    result: dict[str, Any] = {
        kind: {"requests": len(times), "p50": quantile(times, 0.5), "p95": quantile(times, 0.95), "max": max(times)}
        for kind, times in record.seconds.items()
    }
    result |= {
        "errors": len(record.errors),
        "cpu_ms_per_request": 1000 * record.cpu_seconds / max(1, sum(map(len, record.seconds.values()))),
        "machine_load": {"start": record.machine_load[0], "end": record.machine_load[-1], "cores": os.cpu_count()},
        "first_errors": record.errors[:3],
        "unchanged_answers": 1 - len(record.changed) / max(1, record.asked),
        "first_changed": record.changed[:3],
        "memory_mb": {"at_10_s": record.memory[min(10, len(record.memory) - 1)], "end": record.memory[-1]},
        "facts": len(found),
        "facts_that_hold": len(check["holding"]),
        "ledger_is_consistent": consistent,
        "confirmed_facts_survive_a_kill": survived,
        "only_accepted_facts_are_recorded": unseen,
    }
    print(json.dumps(result, indent=2))
    sys.exit(bool(record.errors) or not (consistent and survived and unseen))


if __name__ == "__main__":
    main()
