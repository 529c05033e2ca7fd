"""The page: gradio's components around the service, mounted on the same application as the API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr
from fastapi import FastAPI
from gradio.themes import Base

from factpatch.errors import FactpatchError, FileError
from factpatch.serve import html
from factpatch.serve.api import done
from factpatch.serve.limits import ANSWER_CHARS, NOTE_CHARS, PARAPHRASES, QUESTION_CHARS
from factpatch.serve.service import Service

CSS = Path(__file__).with_name("page.css")
SUGGESTED_WORDINGS = 2
# A click, or Enter on a focused button, reaches the list; the button names the fact to remove.
REMOVE = """element.addEventListener('click', event => {
  const button = event.target.closest('[data-fact]');
  if (button) trigger('click', {fact: button.dataset.fact});
});"""
HEADER = """<header class="fp-header"><h1>factpatch</h1>
<p>Ask the model, correct a wrong answer, and see what else would change before you accept it.
<a href="/docs">API</a></p></header>"""
DOWNLOADS = """<p class="fp-downloads">Download all facts: <a href="/api/download/patch" download>merged patch</a>
<a href="/api/download/adapter" download>LoRA adapter</a> <a href="/api/download/ledger" download>ledger</a></p>"""
Result = TypeVar("Result")


def mount_page(app: FastAPI, service: Service) -> FastAPI:
    """Adds the page to the API's application. It loads nothing from other machines."""
    page = _build(service)
    page.queue(max_size=service.limits.queue, default_concurrency_limit=None)  # the service has its own queue
    theme = Base(
        primary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
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


async def _or_message(waiting: Awaitable[Result]) -> Result | str:
    """The result, or the error as HTML to show in its place."""
    try:
        return await waiting
    except FileError:
        return html.message("The ledger cannot be used at the moment; try again later.", "error")
    except FactpatchError as error:
        text = str(error)
        return html.message(f"{text[:1].upper()}{text[1:]}.", "error")


def _build(service: Service) -> gr.Blocks:
    with gr.Blocks(title="factpatch", analytics_enabled=False) as page:
        gr.HTML(HEADER)
        with gr.Tabs():
            with gr.Tab("Ask and correct", id="ask"):
                changed = _correct(service)
            with gr.Tab("Accepted facts", id="facts") as facts_tab:
                show, listing = _facts(service)
        for event in (page.load, facts_tab.select, changed.change):
            event(show, *listing, **QUIET)
    return page


QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}


def _correct(service: Service) -> gr.State:
    """The first tab. Returns a state that changes whenever a fact has been accepted."""
    proposal_id, accepted = gr.State(""), gr.State(0)
    with gr.Row(elem_classes="fp-columns"):
        with gr.Column(min_width=300):
            gr.HTML(html.section("1", "Ask", "Type a question to see the model's five best answers."))
            question = gr.Textbox(
                label="Question",
                placeholder="What is the capital of Burundi?",
                max_length=QUESTION_CHARS,
                elem_id="question",
            )
            with gr.Row(elem_classes="fp-examples"):
                examples = [
                    (gr.Button(one.question, size="sm", min_width=0), one) for one in service.questions.examples
                ]
            with_facts = gr.Checkbox(True, label="Use the accepted facts", elem_id="with-facts", container=False)
            ask = gr.Button("Ask", variant="primary", elem_id="ask")
            answers = gr.HTML(elem_id="answers")
        with gr.Column(min_width=300):
            gr.HTML(html.section("2", "Correct", "Type the answer it should give; nothing changes until you accept."))
            target = gr.Textbox(label="Correct answer", max_length=ANSWER_CHARS, elem_id="target")
            wordings = gr.Textbox(
                label="Other wordings of the question, one per line (optional)",
                lines=2,
                max_lines=PARAPHRASES,
                max_length=PARAPHRASES * QUESTION_CHARS,
                elem_id="wordings",
            )
            try_it = gr.Button("Try the correction", variant="primary", elem_id="try")
    gr.HTML(html.section("3", "Compare", "See the answers before and after the correction, then accept or discard it."))
    result = gr.HTML(html.message("Try a correction to see it here."), elem_id="result")
    with gr.Row(visible=False, elem_classes=["fp-decide", "fp-bar"]) as decide:
        note = gr.Textbox(
            show_label=False,
            placeholder="Source or remark (optional)",
            max_length=NOTE_CHARS,
            elem_id="note",
            scale=3,
            container=False,
        )
        accept = gr.Button("Accept", variant="primary", elem_id="accept", min_width=120)
        discard = gr.Button("Discard", elem_id="discard", min_width=120)

    async def on_ask(text: str, use_facts: bool) -> tuple[str, str]:
        if not text.strip():
            return html.message("Type a question first.", "error"), ""
        found = await _or_message(done(service.ask(text[:QUESTION_CHARS], use_facts)))
        suggested = "\n".join(service.questions.other_wordings(text)[:SUGGESTED_WORDINGS])
        return found if isinstance(found, str) else html.answered(found), suggested

    async def on_try(text: str, wanted: str, others: str) -> tuple[str, str, Any]:
        if not text.strip() or not wanted.strip():
            return html.message("Type a question and its correct answer first.", "error"), "", gr.Row(visible=False)
        paraphrases = [line[:QUESTION_CHARS] for line in others.splitlines() if line.strip()][:PARAPHRASES]
        found = await _or_message(done(service.propose(text[:QUESTION_CHARS], wanted[:ANSWER_CHARS], paraphrases)))
        if isinstance(found, str):
            return found, "", gr.Row(visible=False)
        return html.proposal(found), found.id, gr.Row(visible=found.success)

    async def on_accept(known: str, remark: str, count: int) -> tuple[str, str, Any, int, str]:
        found = await _or_message(done(service.accept(known, remark[:NOTE_CHARS])))
        if not isinstance(found, str):
            count += 1
            text = f"Accepted as fact {found.id}. Everybody who asks now gets “{found.target}”."
            found = html.message(text, "success")
        return found, "", gr.Row(visible=False), count, ""

    async def on_discard(known: str) -> tuple[str, str, Any]:
        await _or_message(asyncio.to_thread(service.proposals.discard, known))
        return html.message("Discarded. Nothing has changed."), "", gr.Row(visible=False)

    gr.on([ask.click, question.submit], on_ask, [question, with_facts], [answers, wordings], **SHOWN)
    with_facts.input(on_ask, [question, with_facts], [answers, wordings], **SHOWN)
    gr.on([try_it.click, target.submit], on_try, [question, target, wordings], [result, proposal_id, decide], **SHOWN)
    decided = accept.click(
        on_accept, [proposal_id, note, accepted], [result, proposal_id, decide, accepted, note], **SHOWN
    )
    decided.then(on_ask, [question, with_facts], [answers, wordings], **QUIET)
    discard.click(on_discard, [proposal_id], [result, proposal_id, decide], **SHOWN)
    for button, one in examples:
        filled = button.click(lambda one=one: (one.question, one.target), None, [question, target], **QUIET)
        filled.then(on_ask, [question, with_facts], [answers, wordings], **SHOWN)
    return accepted


def _facts(service: Service) -> tuple[Any, tuple[list[Any], list[Any]]]:
    """The second tab. Returns the function that lists the facts, with its inputs and outputs."""
    text = "They answer everybody's questions; removing one brings the model's old answer back."
    gr.HTML(html.section("", "Accepted facts", text))
    with gr.Row(elem_classes="fp-decide"):
        search = gr.Textbox(
            "", label="Search", elem_id="search", placeholder="Words of a question or an answer", scale=3
        )
        verify = gr.Button("Verify all", elem_id="verify", min_width=120)
    gr.HTML(DOWNLOADS)
    report = gr.HTML(elem_id="report")
    listed = gr.HTML(elem_id="facts", js_on_load=REMOVE)

    async def show(words: str | None) -> str:
        found = await _or_message(done(service.facts(words or "")))
        return found if isinstance(found, str) else html.facts(found, words or "")

    async def on_remove(words: str, event: gr.EventData) -> tuple[str, str]:
        removed = await _or_message(done(service.remove(int(event.fact))))
        if not isinstance(removed, str):
            removed = html.message(f"Removed fact {removed.id}: the model says “{removed.before}” again.", "success")
        return removed, await show(words)

    async def on_verify() -> str:
        found = await _or_message(done(service.verify()))
        return found if isinstance(found, str) else html.check(found)

    search.change(show, [search], [listed], **QUIET)
    listed.click(on_remove, [search], [report, listed], **QUIET)
    verify.click(on_verify, None, [report], **SHOWN)
    return show, ([search], [listed])
