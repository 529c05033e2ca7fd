"""The HTTP API: ask, propose, accept, and the ledger's facts. Errors are JSON objects without paths or traces."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from factpatch import __version__
from factpatch.errors import FactpatchError, InputError, LedgerInUseError
from factpatch.serve import schemas
from factpatch.serve.guard import problem
from factpatch.serve.proposals import UnknownError
from factpatch.serve.reference import reference_page
from factpatch.serve.service import Service
from factpatch.serve.worker import BusyError

DESCRIPTION = "Ask a language model, try a correction, and accept it for everybody who uses this service."
RETRY_SECONDS = 2
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem, "description": meaning}
    for status, meaning in {
        401: "The token is missing or wrong.",
        404: "There is no such proposal or fact.",
        422: "The request cannot be used.",
        429: "Too many requests from this client.",
        503: "Too many requests are waiting, or another program uses the ledger.",
    }.items()
}
STATUS: dict[type[FactpatchError], int] = {UnknownError: 404, InputError: 422, BusyError: 503, LedgerInUseError: 503}
SEE_LOG = "the service could not do this; see its log"

log = logging.getLogger("factpatch.serve")


def create_api(service: Service) -> FastAPI:
    """Creates the application with all routes of the API and its reference page at /docs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="factpatch",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    for routes in (_asking, _ledger, _downloads):
        app.include_router(routes(service), responses=ERRORS)

    @app.get("/docs", include_in_schema=False)
    async def reference() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()))

    @app.api_route("/api/{path:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
    async def nothing(path: str) -> Response:
        return problem(404, "there is no such address; see /docs")

    app.add_exception_handler(FactpatchError, _explain)
    app.add_exception_handler(RequestValidationError, _explain_request)
    app.add_exception_handler(HTTPException, _explain_http)
    app.add_exception_handler(Exception, _explain_unexpected)
    return app


def _asking(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["Ask and correct"])

    @router.post("/ask", response_model=schemas.Answered)
    async def ask(asked: schemas.AskRequest) -> Any:
        """Ask a question. Returns the five best answers with their probabilities."""
        return await service.ask(asked.question, asked.with_facts)

    @router.post("/propose", response_model=schemas.Proposal)
    async def propose(correction: schemas.ProposeRequest) -> Any:
        """Try a correction, on the question, its other wordings and a sample of other questions.

        Nothing changes until the proposal is accepted. It expires after half an hour.
        """
        return await service.propose(correction.question, correction.target, correction.paraphrases)

    @router.post("/accept", response_model=schemas.Fact)
    async def accept(accepted: schemas.AcceptRequest) -> Any:
        """Accept a proposal: the fact is recorded, and used for everybody's questions."""
        return await service.accept(accepted.id, accepted.note)

    @router.post("/discard", response_model=schemas.Discarded)
    async def discard(discarded: schemas.DiscardRequest) -> Any:
        """Forget a proposal."""
        service.proposals.discard(discarded.id)
        return {}

    return router


def _ledger(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api/facts", tags=["Facts"])

    @router.get("", response_model=schemas.Facts)
    async def facts(search: str = "", all: bool = False) -> Any:
        """List the accepted facts, newest first; with `all`, removed and replaced ones too."""
        return {"facts": await service.facts(search, active_only=not all)}

    @router.post("/verify", response_model=schemas.Verification)
    async def verify() -> Any:
        """Ask every accepted fact in all its wordings, and a sample of other questions."""
        return await service.verify()

    @router.get("/{fact}", response_model=schemas.FactHistory)
    async def fact(fact: int) -> Any:
        """Show everything that is recorded about one fact."""
        found, history = await service.history(fact)
        return {"fact": found, "history": history}

    @router.delete("/{fact}", response_model=schemas.Fact)
    async def remove(fact: int) -> Any:
        """Remove a fact. Its record and history stay."""
        return await service.remove(fact)

    return router


def _downloads(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["Downloads"])

    @router.get("/download/patch", response_class=Response)
    async def patch() -> Response:
        """Download all accepted facts in one patch file."""
        return _file(await service.merged_patch(), "facts.safetensors")

    @router.get("/download/adapter", response_class=Response)
    async def adapter(rank: int | None = None) -> Response:
        """Download all accepted facts as a zipped LoRA adapter for PEFT, vLLM and llama.cpp.

        With `rank` 8, 16, 32, 64, 128, 256, 320 or 512, or if the facts need more than 512, the change is truncated;
        README.md in the archive says what that costs.
        """
        return _file(await service.merged_adapter(rank), "facts-adapter.zip")

    @router.get("/download/ledger", response_class=Response)
    async def ledger() -> Response:
        """Download a copy of the ledger."""
        return _file(await service.ledger_file(), "facts.db")

    @router.get("/facts/{fact}/patch", response_class=Response)
    async def fact_patch(fact: int) -> Response:
        """Download the patch of one fact."""
        return _file(await service.fact_patch(fact), f"fact-{fact}.safetensors")

    @router.get("/proposals/{proposal}/patch", response_class=Response)
    async def proposal_patch(proposal: str) -> Response:
        """Download the patch of a proposal."""
        return _file(await service.proposal_patch(proposal), "proposal.safetensors")

    return router


def _file(content: bytes, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def _explain(request: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    message = str(error)
    if isinstance(error, LedgerInUseError) or status == 500:  # the message may name files of this machine
        log.error("%s", error)
        message = "another program uses the ledger; try again" if status == 503 else SEE_LOG
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return problem(status, message, headers)


async def _explain_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    malformed = any(one["type"] == "json_invalid" for one in found)
    message = "the body is not valid JSON" if malformed else "; ".join(map(_in_words, found))
    return problem(400 if malformed else 422, message)


def _in_words(error: dict[str, Any]) -> str:
    place: Sequence[Any] = [part for part in error["loc"] if part not in ("body", "query", "path")]
    return f"{'.'.join(map(str, place)) or 'body'}: {error['msg']}"


async def _explain_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail).lower(), dict(error.headers or {}))


async def _explain_unexpected(request: Request, error: Exception) -> JSONResponse:
    return problem(500, "the service failed; see its log")
