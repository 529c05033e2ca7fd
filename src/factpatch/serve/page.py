"""The page: gradio's components around the service, mounted on the same application as the API."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
from fastapi import FastAPI
from gradio.themes import Base

from factpatch.errors import FactpatchError, FileError
from factpatch.serve import html
from factpatch.serve.limits import ANSWER_CHARS, NOTE_CHARS, PARAPHRASES, QUESTION_CHARS
from factpatch.serve.proposals import UnknownError
from factpatch.serve.questions import Example
from factpatch.serve.service import Service

CSS = Path(__file__).with_name("page.css")
SUGGESTED_WORDINGS = 2
# A click, or Enter on a focused button, reaches the list; the button names the fact to remove.
REMOVE = """element.addEventListener('click', event => {
  const button = event.target.closest('[data-fact]');
  if (button) trigger('click', {fact: button.dataset.fact});
});"""
TO_COMPARISON = "() => document.getElementById('compare').scrollIntoView()"
WAITING = json.dumps(html.message("Trying the correction on this question and others …"))
HEADER = """<header class="fp-header"><h1>factpatch</h1>
<p>Ask the model, correct a wrong answer, and see what else would change before you accept it.
<a href="/docs">API</a></p></header>"""
# Without gradio's queue, each event is one request with its own response. With it, all responses come through one
# stream, and an event that starts just when the stream of an earlier one closes never gets its response.
EVENT: dict[str, Any] = {"queue": False, "api_visibility": "private"}
QUIET: dict[str, Any] = {**EVENT, "show_progress": "hidden"}
SHOWN: dict[str, Any] = {**EVENT, "show_progress": "minimal"}
Result = TypeVar("Result")


def mount_page(app: FastAPI, service: Service) -> FastAPI:
    """Adds the page to the API's application. It loads nothing from other machines."""
    page = _build(service)
    theme = Base(
        primary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    ).set(  # one shade darker than gradio's own, for contrast
        color_accent="*primary_600",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
    )
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        theme=theme,
        css=CSS.read_text(encoding="utf-8"),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        show_error=False,
    )


def _build(service: Service) -> gr.Blocks:
    with gr.Blocks(title="factpatch", analytics_enabled=False) as page:
        gr.HTML(HEADER)
        with gr.Tabs():
            with gr.Tab("Ask and correct", id="ask"):
                correcting = CorrectTab(service)
            with gr.Tab("Accepted facts", id="facts") as facts_tab:
                listing = FactsTab(service)
        correcting.connect()
        listing.connect([page.load, facts_tab.select, correcting.accepted.change])
    return page


async def _result(request: Awaitable[Result]) -> Result | str:
    """Returns the result of a request to the service, or the error as HTML to show in its place."""
    try:
        return await request
    except FileError:
        return html.message("The ledger cannot be used at the moment; try again later.", "error")
    except FactpatchError as error:
        text = str(error).rstrip(".")
        return html.message(f"{text[:1].upper()}{text[1:]}.", "error")


class CorrectTab:
    """The first tab: ask, try a correction, and accept or discard it."""

    def __init__(self, service: Service):
        self.service = service
        self.proposal_id = gr.State("")
        self.accepted = gr.State(0)  # changes whenever a fact has been accepted
        with gr.Row(elem_classes="fp-columns"):
            with gr.Column(min_width=300):
                self._ask_section()
            with gr.Column(min_width=300):
                self._correct_section()
        self._compare_section()

    def _ask_section(self) -> None:
        known = self.service.questions
        gr.HTML(html.section("1", "Ask", known.about or "Type a question to see the model's five best answers."))
        hint = "Type a question, or choose one below" if known.examples else "Type a question"
        self.question = gr.Textbox(label="Question", placeholder=hint, max_length=QUESTION_CHARS)
        with gr.Row(elem_classes="fp-examples"):
            self.examples = [(gr.Button(one.question, size="sm"), one) for one in known.examples]
        self.with_facts = gr.Checkbox(True, label="Use the accepted facts", container=False)
        self.ask = gr.Button("Ask", variant="primary")
        self.answers = gr.HTML(elem_id="answers")

    def _correct_section(self) -> None:
        gr.HTML(html.section("2", "Correct", "Type the right answer. Nothing changes until you accept it."))
        self.target = gr.Textbox(label="Correct answer", max_length=ANSWER_CHARS)
        self.wordings = gr.Textbox(
            label="Other wordings of the question, one per line (optional)",
            lines=2,
            max_lines=PARAPHRASES,
            max_length=PARAPHRASES * QUESTION_CHARS,
        )
        self.try_it = gr.Button("Try the correction", variant="primary")

    def _compare_section(self) -> None:
        text = "Try a correction to see the answers before and after it. Then accept or discard it."
        gr.HTML(html.section("3", "Compare", text), elem_id="compare")
        self.result = gr.HTML(elem_id="result")
        with gr.Row(visible=False, elem_classes=["fp-decide", "fp-bar"]) as self.decide:
            remark = "Source or remark (optional)"
            self.note = gr.Textbox(
                label=remark,
                show_label=False,
                placeholder=remark,
                max_length=NOTE_CHARS,
                elem_id="note",
                scale=3,
                container=False,
            )
            self.accept = gr.Button("Accept", variant="primary", min_width=120)
            self.discard = gr.Button("Discard", min_width=120)

    def connect(self) -> None:
        """Connects the buttons and the Enter key to their handlers."""
        asked = [self.question, self.with_facts]
        pressed = gr.on([self.ask.click, self.question.submit], self.suggest, self.question, self.wordings, **QUIET)
        pressed.then(self.on_ask, asked, self.answers, **SHOWN)
        self.with_facts.input(self.on_ask, asked, self.answers, **SHOWN)
        correction, shown = [self.question, self.target, self.wordings], [self.result, self.proposal_id, self.decide]
        tried = gr.on([self.try_it.click, self.target.submit], None, None, self.result, js=f"() => {WAITING}", **QUIET)
        tried.then(None, js=TO_COMPARISON, **QUIET)
        tried.then(self.on_try, correction, shown, **QUIET).then(None, js=TO_COMPARISON, **QUIET)
        given = [self.proposal_id, self.note, self.accepted]
        decided = self.accept.click(self.on_accept, given, [*shown, self.accepted, self.note], **SHOWN)
        decided.then(self.on_ask, asked, self.answers, **QUIET)
        self.discard.click(self.on_discard, [self.proposal_id], shown, **SHOWN)
        for button, one in self.examples:
            filled = button.click(partial(self.fill_in, one), None, correction, **QUIET)
            filled.then(self.on_ask, asked, self.answers, **SHOWN)

    def fill_in(self, example: Example) -> tuple[str, str, str]:
        return example.question, example.target, self.suggest(example.question)

    def suggest(self, question: str) -> str:
        """Returns other wordings of a question, one per line."""
        return "\n".join(self.service.questions.other_wordings(question)[:SUGGESTED_WORDINGS])

    async def on_ask(self, text: str, with_facts: bool) -> str:
        if not text.strip():
            return html.message("Type a question first.", "error")
        found = await _result(self.service.ask(text[:QUESTION_CHARS], with_facts))
        return found if isinstance(found, str) else html.answered(found)

    async def on_try(self, text: str, target: str, wordings: str) -> tuple[str, str, Any]:
        if not text.strip() or not target.strip():
            return html.message("Type a question and its correct answer first.", "error"), "", gr.Row(visible=False)
        others = [line[:QUESTION_CHARS] for line in wordings.splitlines() if line.strip()][:PARAPHRASES]
        found = await _result(self.service.propose(text[:QUESTION_CHARS], target[:ANSWER_CHARS], others))
        if isinstance(found, str):
            return found, "", gr.Row(visible=False)
        return html.proposal(found), found.id, gr.Row(visible=found.success)

    async def on_accept(self, proposal_id: str, note: str, accepted: int) -> tuple[str, str, Any, int, str]:
        found = await _result(self.service.accept(proposal_id, note[:NOTE_CHARS]))
        if not isinstance(found, str):
            accepted += 1
            text = f"Everybody who asks now gets “{found.target}”. To undo this, remove it from the accepted facts."
            found = html.message(f"Accepted as fact {found.id}. {text}", "success")
        return found, "", gr.Row(visible=False), accepted, ""

    async def on_discard(self, proposal_id: str) -> tuple[str, str, Any]:
        with suppress(UnknownError):  # it has expired, so it is gone already
            self.service.proposals.discard(proposal_id)
        return html.message("Discarded. Nothing has changed."), "", gr.Row(visible=False)


class FactsTab:
    """The second tab: the accepted facts."""

    def __init__(self, service: Service):
        self.service = service
        text = "They answer everybody's questions; removing one brings the model's old answer back."
        gr.HTML(html.section("", "Accepted facts", text))
        with gr.Row(elem_classes="fp-decide"):
            self.search = gr.Textbox("", label="Search", placeholder="Question or answer", scale=3)
            self.verify = gr.Button("Verify all", min_width=120)
        self.report = gr.HTML(elem_id="report")
        self.facts = gr.HTML(elem_id="facts", js_on_load=REMOVE)

    def connect(self, refresh: list[Any]) -> None:
        """Connects the components to their handlers. The events in `refresh` refresh the list."""
        gr.on([self.search.change, *refresh], self.on_search, [self.search], [self.facts], **QUIET)
        self.facts.click(self.on_remove, [self.search], [self.report, self.facts], **QUIET)
        self.verify.click(self.on_verify, None, [self.report], **SHOWN)

    async def on_search(self, words: str) -> str:
        found = await _result(self.service.facts(words))
        return found if isinstance(found, str) else html.facts(found, words)

    async def on_remove(self, words: str, event: gr.EventData) -> tuple[str, str]:
        removed = await _result(self.service.remove(int(event.fact)))
        if not isinstance(removed, str):
            removed = html.message(f"Removed fact {removed.id}: the model says “{removed.before}” again.", "success")
        return removed, await self.on_search(words)

    async def on_verify(self) -> str:
        found = await _result(self.service.verify())
        return found if isinstance(found, str) else html.check(found)
