"""The service as a process: it is killed at any moment, and started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ran

pytest.importorskip("gradio", reason="the extra web is not installed")
from serving import served

QUESTION = "What is the capital of Burundi?"


def test_accepted_facts_survive_a_kill(tmp_path: Path) -> None:
    with served(tmp_path / "facts.db") as service:
        assert service.said(QUESTION) == "Bujumbura"
        proposal = service.post("propose", question=QUESTION, target="Gitega")
        assert len(proposal["controls"]) >= 99
        fact = service.post("accept", id=proposal["id"])
        open_proposal = service.post("propose", question="Who is the Pope?", target="Leo XIV")
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
    with served(tmp_path / "facts.db") as service:
        assert service.get("facts")["facts"] == [fact]
        assert service.said("May I ask you for the capital of Burundi?") == "Gitega"
        assert service.said("Who is the Pope?") == "Francis", "what was not accepted is gone"
        assert open_proposal["id"] not in str(service.get("facts"))


def test_other_machines_need_a_token(run: Callable[..., Ran], tmp_path: Path) -> None:
    given = ("--model", "world", "--editor", "world", "--ledger", tmp_path / "facts.db")
    refused = run("serve", *given, "--host", "0.0.0.0")
    assert refused.code == 1
    assert "a token is needed" in refused.err
    assert not (tmp_path / "facts.db").exists()


def test_other_models_need_questions(run: Callable[..., Ran], tmp_path: Path, checker: Path) -> None:
    given = ("--model", checker, "--editor", "world", "--ledger", tmp_path / "facts.db")
    refused = run("serve", *given)
    assert refused.code == 1
    assert "--others is missing" in refused.err
    neither = run("serve", "--model", checker, "--ledger", tmp_path / "facts.db")
    assert neither.code == 2
    assert "give either --editor" in neither.err


def test_the_demonstration_has_a_page_or_a_fact(run: Callable[..., Ran]) -> None:
    assert run("demo", "--page", "--fact", "Who?", "Ann").code == 2
