"""Hundreds of connections, and slow ones: the server goes on answering others."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

pytest.importorskip("uvicorn", reason="the extra web is not installed")
import uvicorn
from starlette.responses import PlainTextResponse

from factpatch.serve import connections, guard
from factpatch.serve.connections import allow_connections, server_config
from factpatch.serve.guard import Guard
from factpatch.serve.limits import HEAD_BYTES, RateLimiter

WAIT = 60.0  # seconds; a busy machine may need many times what an idle one does
HALF_HEAD = b"POST /api/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_BODY = b"POST /api/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"


@contextmanager
def running() -> Iterator[int]:
    """The guard around an application that always says hello, on a free port."""
    server = uvicorn.Server(server_config(Guard(PlainTextResponse("hello"), RateLimiter(1_000_000))))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = server.force_exit = True
        thread.join()


def answer(port: int) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        connection.request("GET", "/")
        found = connection.getresponse()
        return found.status, found.read()
    finally:
        connection.close()


def connected(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    connection.sendall(sent)
    return connection


def test_others_are_answered_beside_500_slow_connections() -> None:
    allow_connections()
    with running() as port, ExitStack() as opened:
        for number in range(500):
            opened.enter_context(connected(port, (b"", HALF_HEAD, HALF_BODY)[number % 3]))
        assert answer(port) == (200, b"hello")


def test_slow_requests_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    with running() as port:
        with connected(port, HALF_BODY) as slow:
            assert b"408" in slow.recv(1000).splitlines()[0]
        with connected(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as second:
            received = b""
            while not received.endswith(b"hello"):
                received += second.recv(1000)
            monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
            second.sendall(HALF_HEAD)
            for slow in (second, connected(port, b""), connected(port, HALF_HEAD)):
                with slow, suppress(ConnectionResetError):  # if bytes arrive after it was closed
                    assert slow.recv(1000) == b"", "closed without an answer"


def test_large_heads_and_too_many_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    with running() as port:
        with connected(port, HALF_HEAD + b"x" * HEAD_BYTES) as large:
            assert b"400" in large.recv(1000).splitlines()[0]
        with connected(port, HALF_HEAD), connected(port, HALF_HEAD):
            assert answer(port)[0] == 503
        while (found := answer(port)) != (200, b"hello"):  # until the server has noticed that the others are gone
            assert found[0] == 503
