"""Ledgers under fire: processes that are killed at any moment, and two at once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from processes import HANG, forked
from samples import texts
from test_ledger import LABELS, OTHERS, Guess, assert_same_bits, rebuilt

from factpatch import ledger_sums
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.models import TaskModel

OPERATIONS, KILLS = (1000, 50) if os.environ.get("FACTPATCH_LONG_TESTS") else (150, 10)
INPUTS = texts(30, seed=8)


@pytest.fixture(autouse=True)
def totals_from_the_third_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_sums, "FEW", 2)


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return tiny.build("bert")


def change_at_random(path: Path, model: TaskModel, seed: int, log: Path) -> None:
    """Adds, replaces, removes and merges facts until killed; what is done is written down afterwards."""
    rng = random.Random(seed)
    while True:
        with Ledger(path, model) as ledger:
            facts = ledger.facts()
            if facts and rng.random() < 0.4:
                fact = rng.choice(facts)
                ledger.remove(fact.id)
                line = f"{fact.x}\t\n"
            else:
                x = rng.choice(INPUTS)
                target = rng.choice([label for label in LABELS if label != model.predict([x])[0]])
                try:
                    ledger.add(Guess(), [FactEdit(x, target)])
                except InputError:  # no guess succeeded
                    continue
                line = f"{x}\t{target}\n"
            with log.open("a") as file:
                file.write(line)
            if rng.random() < 0.5:
                ledger.patch()


def active(path: Path) -> dict[str, str]:
    with Ledger(path) as ledger:
        return {fact.x: fact.target for fact in ledger.facts()}


def changes(path: Path) -> int:
    with sqlite3.connect(path) as db:
        found = db.execute("SELECT count(*) FROM history").fetchone()[0]
    db.close()
    return found


def replayed(state: dict[str, str], log: Path) -> Iterator[tuple[str, str]]:
    lines = log.read_text().splitlines() if log.exists() else []
    latest = {**state, **dict(line.split("\t") for line in lines)}
    return ((x, target) for x, target in latest.items() if target)


def test_killed_at_any_moment_the_ledger_holds_what_was_committed(tmp_path: Path, model: TaskModel) -> None:
    path, log, rng = tmp_path / "facts.db", tmp_path / "log", random.Random(0)
    Ledger(path, model, OTHERS).close()
    state: dict[str, str] = {}
    for kill in range(KILLS):
        process = forked(change_at_random, path, model, kill, log)
        wanted = OPERATIONS * (kill + 1) // KILLS
        start = time.monotonic()
        while changes(path) < wanted and process.is_alive():
            assert time.monotonic() - start < HANG, "the process hangs"
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()
        found = active(path)
        expected = dict(replayed(state, log))
        differing = {x for x in found.keys() | expected.keys() if found.get(x) != expected.get(x)}
        assert len(differing) <= 1, "only a change that was not written down yet may be there besides"
        with Ledger(path, model) as ledger:
            assert_same_bits(ledger.patch(), rebuilt(path, model, tmp_path / "copy"))
        state = found
        log.unlink(missing_ok=True)
    assert changes(path) >= OPERATIONS


def add_each(path: Path, model: TaskModel, edits: list[FactEdit]) -> None:
    for edit in edits:
        with Ledger(path, model) as ledger:
            ledger.add(Guess(), [edit])
            ledger.patch()


def test_two_processes_at_once_lose_nothing(tmp_path: Path, model: TaskModel) -> None:
    path = tmp_path / "facts.db"
    edits = []
    for x in INPUTS[:16]:
        for label in model.candidates([x], count=3)[0][1:]:
            edit = FactEdit(x, label)
            (patch,) = Guess().propose(model, [edit])
            if model.predict_patched([patch], [x]) == [label]:
                edits.append(edit)
                break
    assert len(edits) > 8
    Ledger(path, model, OTHERS).close()
    processes = [forked(add_each, path, model, edits[part::2]) for part in (0, 1)]
    for process in processes:
        process.join(HANG)
        assert process.exitcode == 0
    assert active(path) == {edit.x: edit.a for edit in edits}
    with Ledger(path, model) as ledger:
        found = ledger.patch()
    assert_same_bits(found, rebuilt(path, model, tmp_path / "copy"))
