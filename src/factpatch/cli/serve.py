"""The command `factpatch serve`."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factpatch.cli import common
from factpatch.cli.common import Device, Json, Model, Seed, Template, at_least, escape
from factpatch.cli.evaluate_options import MethodOptions
from factpatch.cli.methods import Editor, Method, check_method, fit_method, load_method
from factpatch.cli.others import MAX_OTHERS, evenly_spaced
from factpatch.errors import InputError

if TYPE_CHECKING:
    from factpatch.models import TaskModel
    from factpatch.scope import Scope
    from factpatch.serve.questions import Questions

OTHERS_FOR_MERGING = 1200  # questions that a new ledger's merged patch leaves alone


def serve(
    model: Model,
    ledger: Annotated[Path, typer.Option(help="Ledger file. It is created if it does not exist.")],
    editor: Editor = None,
    method: Method = None,
    setting: MethodOptions = None,
    others: Annotated[
        Path | None,
        typer.Option(
            help="Revision file with ordinary questions. Every correction is tested on a sample of them. "
            "Default for --model world: its own questions."
        ),
    ] = None,
    scope: Annotated[
        Path | None,
        typer.Option(
            help="A scope made by factpatch scope train, which decides what a question is about. Default for --model "
            "world: its own scope, otherwise an untrained scope fitted to --others."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. All except 127.0.0.1 need --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port.")] = 7860,
    token: Annotated[
        str | None,
        typer.Option(envvar="FACTPATCH_TOKEN", help="Secret of at least 16 characters that clients must send."),
    ] = None,
    rate: Annotated[int, at_least(1, "Requests per minute allowed for each client.")] = 600,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    template: Template = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Serve a web page and an HTTP API to ask a model questions and to correct facts, which are recorded in a ledger.

    Needs the extra `web`. With --json, one object with the page's URL is printed when the page is ready.

    Example: factpatch serve --model world --editor world --ledger facts.db
    """
    options = check_method(editor, method, setting)
    with common.working("loading"):
        from factpatch.serve import run

        run.require_web()
        run.check_exposure(host, token)
        from factpatch.serve.limits import Limits
        from factpatch.serve.service import Service

        questions = _find_questions(model, others, seed)
        task_model = common.load(model, device, seed, template)
        _leave_a_core(task_model)
        chosen = load_method(task_model, editor, method, options)
        chosen = fit_method(chosen, task_model, others if chosen.needs_sample else None, MAX_OTHERS)
        fact_scope = _find_scope(task_model, model, scope, others)
        _create_ledger(ledger, task_model, questions)
        service = Service(task_model, chosen, ledger, fact_scope, questions, Limits(requests_per_minute=rate))

    def on_ready(url: str) -> None:
        if as_json:
            common.print_json({"url": url, "model": model, "ledger": str(ledger)})
        else:
            facts = escape(str(ledger))
            common.stdout.print(f"Serving {escape(model)} with the facts of {facts}: {url}", soft_wrap=True)
            common.stdout.print(f"API reference: {url}/docs. Stop with Ctrl-C.")
        if open_browser:
            webbrowser.open(url)

    run.listen(service, host, port, token, on_ready)


def _leave_a_core(model: TaskModel) -> None:
    """Keeps one core free for the web server; threads that share a core with it slow the model down a lot."""
    import torch

    if model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _find_questions(model: str, others: Path | None, seed: int) -> Questions:
    from factpatch.serve.questions import read_questions, world_questions

    if others is not None:
        return read_questions(others, seed)
    if model != "world":
        raise InputError("--others is missing; give a file of questions that users ask, such as a revision file")
    return world_questions(seed)


def _find_scope(task_model: TaskModel, model: str, scope: Path | None, others: Path | None) -> Scope:
    from factpatch import world
    from factpatch.data.revisions import read_revisions
    from factpatch.scope import Scope

    if scope is not None or model == "world":
        return Scope.load(scope or world.SCOPE, task_model)
    return Scope.plain(task_model, list(read_revisions(str(others))))


def _create_ledger(path: Path, model: TaskModel, questions: Questions) -> None:
    """Creates the ledger if there is none. It merges in sequence, because few editors are trained for merging."""
    from factpatch.ledger import Ledger

    if not path.exists():
        texts = [group[0] for group in questions.groups]
        Ledger(path, model, evenly_spaced(texts, OTHERS_FOR_MERGING), mode="sequence").close()
