"""A service in a process of its own, as users start it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from processes import HANG, run_aside

from factpatch import world
from factpatch.ledger import Ledger
from factpatch.models import load_model


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], url: str, token: str | None):
        self.process, self.url = process, url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=f"{url}/api/", headers=headers, timeout=HANG)

    def post(self, path: str, **sent: Any) -> Any:
        return self.client.post(path, json=sent).raise_for_status().json()

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def said(self, question: str) -> str:
        return self.post("ask", question=question)["answers"][0]["text"]


@contextmanager
def served(ledger: Path, token: str | None = None) -> Iterator[Served]:
    """Serves the embedded world on a free port, and kills the service at the end."""
    if not ledger.exists():  # the sample for merging may be small here
        Ledger(ledger, load_model("world", "cpu"), [fact.questions[0] for fact in world.facts()[:30]]).close()
    given = ["--model", "world", "--editor", "world", "--ledger", str(ledger), "--port", "0", "--device", "cpu"]
    command = ["-m", "factpatch", "serve", *given, "--json", *(["--token", token] if token else [])]
    process = run_aside(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the service did not start"
        service = Served(process, json.loads(line)["url"], token)
        with service.client:
            yield service
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
