"""Checks every request first: its host, token, size and rate. Adds security headers to every response."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from factpatch.serve.limits import BODY_BYTES, BODY_SECONDS, RateLimiter

COOKIE = "factpatch-login"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
COUNTED = ("/api/", "/login", "/gradio_api/run")
CLOSED = (  # not used by the page
    *(f"/gradio_api/{name}" for name in ("call", "deep_link", "proxy", "queue", "stream", "upload")),
    "/monitoring",
)
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; "
    "form-action 'self'; base-uri 'self'; object-src 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,  # the browser itself then refuses to load anything from elsewhere
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
LOGIN = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>factpatch</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>:root{{color-scheme:light dark}}body{{font:16px system-ui,sans-serif;max-width:22rem;margin:15vh auto;
padding:0 1rem}}input,button{{font:inherit;padding:.6rem;width:100%;box-sizing:border-box;margin-top:.6rem}}</style>
</head><body><h1>factpatch</h1><p>{message}</p><form method="post" action="/login"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" autofocus required>
<button type="submit">Log in</button></form></body></html>"""


class Guard:
    """ASGI middleware. Without a token, only requests to a loopback host are answered."""

    def __init__(self, app: ASGIApp, rate: RateLimiter, token: str | None = None):
        self.app, self.rate, self.token = app, rate, token
        self._session = secrets.token_hex(32)  # the cookie of everybody who has logged in since the start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        send = _with_headers(send)
        request = Request(scope, receive)
        refusal, body = self._refusal(request), b""
        if refusal is None and request.method not in ("GET", "HEAD", "OPTIONS"):
            refusal, body = await _read_body(request)
            receive = _replay(body, receive)
        if refusal is None and request.url.path == "/login":
            refusal = self._login(request, body)
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        path = request.url.path
        if self.token is None and request.url.hostname not in LOOPBACK:
            return problem(403, "this service answers on its own machine only; use http://127.0.0.1")
        if path.startswith(CLOSED):
            return problem(404, "this address is not available; see /docs")
        if path.startswith(COUNTED):
            client = request.client.host if request.client else "unknown"
            if seconds := self.rate.wait(client):
                wait = int(seconds) + 1
                return problem(429, f"too many requests; try again in {wait} s", {"Retry-After": str(wait)})
        if self._is_allowed(request) or path == "/login":
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        message = "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
        return problem(401, message, {"WWW-Authenticate": "Bearer"})

    def _is_allowed(self, request: Request) -> bool:
        if self.token is None or same_secret(request.cookies.get(COOKIE, ""), self._session):
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and same_secret(given, self.token)

    def _login(self, request: Request, body: bytes) -> Response:
        if self.token is None:
            return RedirectResponse("/", 303)
        if request.method != "POST":
            return HTMLResponse(LOGIN.format(message="Enter the token that the service was started with."))
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        if not same_secret(given, self.token):
            return HTMLResponse(LOGIN.format(message="This token is wrong; try again."), 401)
        response = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._session, httponly=True, samesite="strict", secure=secure)
        return response


def same_secret(given: str, expected: str) -> bool:
    """Compares two secrets in constant time. Hashing first hides the length, and makes any text comparable."""
    return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), hashlib.sha256(expected.encode()).digest())


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


async def _read_body(request: Request) -> tuple[Response | None, bytes]:
    """Reads the whole body, or returns a refusal if it is too large or too slow."""
    too_large = problem(413, f"the request is larger than {BODY_BYTES >> 10} KiB; send less")
    length = request.headers.get("content-length", "0")
    if len(length) > 9 or int(length) > BODY_BYTES:  # the server has checked that it is a number
        return too_large, b""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    return too_large, b""
    except (TimeoutError, ClientDisconnect):
        return problem(408, "the request did not arrive in time; send it again"), b""
    return None, bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
