"""Measures `factpatch serve` under load: many clients ask, some propose and accept, then the service is killed.

python tools/load_test.py --seconds 60 --clients 50 --proposers 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from factpatch import world
from factpatch.facts import same

MANY = 1_000_000  # requests per minute: all clients have the same address here
WAIT = 60.0  # seconds after which a request counts as an error


@dataclass
class Record:
    """What the clients have seen."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MB, once per second
    accepted: dict[int, tuple[str, str]] = field(default_factory=dict)  # facts by id, as the service confirmed them
    tried: set[tuple[str, str]] = field(default_factory=set)  # question and target of everything ever sent to accept
    asked: int = 0
    right: int = 0


async def send(client: httpx.AsyncClient, record: Record, kind: str, **sent: Any) -> dict[str, Any] | None:
    start = time.perf_counter()
    try:
        answer = await client.post(f"/api/{kind}", json=sent)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        body = error.response.text[:200] if isinstance(error, httpx.HTTPStatusError) else ""
        record.errors.append(f"{kind}: {type(error).__name__} {body}")
        return None
    record.seconds[kind].append(time.perf_counter() - start)
    return answer.json()


async def asker(client: httpx.AsyncClient, record: Record, facts: list[world.Fact], seed: int, end: float) -> None:
    """Asks facts that nobody changes, whose answers must therefore stay."""
    rng = random.Random(seed)
    while time.perf_counter() < end:
        fact = rng.choice(facts)
        found = await send(client, record, "ask", question=rng.choice(fact.questions))
        if found is not None:
            record.asked += 1
            record.right += same(found["answers"][0]["text"], fact.answer)


async def proposer(client: httpx.AsyncClient, record: Record, facts: list[world.Fact], seed: int, end: float) -> None:
    """Proposes wrong answers to facts of its own, accepts two of three, and discards the others."""
    rng = random.Random(seed)
    for fact in facts:
        if time.perf_counter() >= end:
            return
        target = rng.choice([one.answer for one in world.facts() if one.relation == fact.relation])
        if same(target, fact.answer):
            continue
        question = fact.questions[0]
        proposal = await send(client, record, "propose", question=question, target=target)
        if proposal is None or not proposal["success"]:
            continue
        if rng.random() < 1 / 3:
            await send(client, record, "discard", id=proposal["id"])
            continue
        record.tried.add((question, target))
        accepted = await send(client, record, "accept", id=proposal["id"])
        if accepted is not None:
            record.accepted[accepted["id"]] = (question, target)
            now = await send(client, record, "ask", question=question)
            if now is not None and not same(now["answers"][0]["text"], target):
                record.errors.append(f"{question}: accepted {target}, but the service says {now['answers'][0]['text']}")


async def watch(process: psutil.Process, record: Record, end: float) -> None:
    while time.perf_counter() < end:
        record.memory.append(process.memory_info().rss / 1e6)
        await asyncio.sleep(1)


async def load(url: str, process: psutil.Process, record: Record, options: argparse.Namespace) -> None:
    facts = random.Random(options.seed).sample(world.facts(), len(world.facts()))
    own, rest = facts[: len(facts) // 2], facts[len(facts) // 2 :]
    end = time.perf_counter() + options.seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as client:
        tasks = [proposer(client, record, own[n :: options.proposers], n, end) for n in range(options.proposers)]
        tasks += [asker(client, record, rest, n, end) for n in range(options.proposers, options.clients)]
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
    """A few more seconds of load, during which the service is killed; what it had confirmed must survive."""
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
        "first_errors": record.errors[:3],
        "unchanged_answers": record.right / max(1, record.asked),
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
