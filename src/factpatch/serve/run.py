"""Starts the service: puts the API, the page and the guard together and listens on one address."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from ipaddress import ip_address

from factpatch.errors import InputError, ModelError
from factpatch.serve.limits import RateLimiter
from factpatch.serve.service import Service

TOKEN_CHARS = 16  # the shortest token that is accepted


def require_web() -> None:
    """Raises a ModelError if the packages of the extra `web` are missing."""
    # Keep gradio, which reads these settings when it is imported, from sending anything to other machines.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import fastapi  # noqa: F401
        import gradio  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ModelError(f"the service needs {error.name}; install it with pip install 'factpatch[web]'") from error


def check_exposure(host: str, token: str | None) -> None:
    """Raises an InputError if other machines could connect without a token, or if the token is too short."""
    if token is not None and len(token) < TOKEN_CHARS:
        raise InputError(f"the token has {len(token)} characters, expected at least {TOKEN_CHARS}; choose a longer one")
    if token is None and not _is_loopback(host):
        raise InputError(f"other machines can reach {host}, so a token is needed; give one with --token")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def create_app(service: Service, token: str | None):
    """Creates the complete ASGI application."""
    require_web()
    from factpatch.serve.api import create_api
    from factpatch.serve.guard import Guard
    from factpatch.serve.page import mount_page

    rate = RateLimiter(service.limits.requests_per_minute)
    return Guard(mount_page(create_api(service), service), rate, token)


def listen(service: Service, host: str, port: int, token: str | None, on_ready: Callable[[str], object]) -> None:
    """Serves until it is interrupted. Calls `on_ready` with the address of the page; port 0 means any free port."""
    import uvicorn

    from factpatch.serve.connections import allow_connections, server_config

    check_exposure(host, token)
    allow_connections()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        listener.listen()  # before the page is opened in a browser, which then waits for the server to start
        app = create_app(service, token)
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(server_config(app)).run(sockets=[listener])
