"""The page in a browser: log in, ask, correct, accept, reload and remove, by mouse and by keyboard, wide and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the extra web is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")
from playwright import sync_api as playwright
from serving import Served, served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="the system has no Chromium; install the package chromium")

WAIT = 120_000  # milliseconds; a busy machine may need many times what an idle one does
TOKEN = "a token that nobody guesses"
QUESTION, BEFORE, AFTER = "What is the capital of Burundi?", "Bujumbura", "Gitega"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served") / "facts.db", TOKEN) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # No name is resolved, so that nothing can be loaded from elsewhere without failing.
        options = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = started.chromium.launch(executable_path=BROWSER, args=options)
        yield browser
        browser.close()


class Visitor:
    """Somebody who uses the page."""

    def __init__(self, browser: Any, service: Served, width: int, scheme: str):
        self.context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page, self.width, self.url = self.context.new_page(), width, service.url
        self.page.set_default_timeout(WAIT)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    def log_in(self) -> None:
        self.page.goto(self.url)
        self.write("Token", TOKEN)
        self.press("Log in")
        self.page.get_by_label("Question", exact=True).wait_for()

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.get_by_label("Question", exact=True).wait_for()

    def shows(self, place: str, text: str) -> None:
        playwright.expect(self.page.locator(place)).to_contain_text(text, timeout=WAIT)

    def press(self, name: str, role: str = "button") -> None:
        self.page.get_by_role(role, name=name, exact=True).click()

    def write(self, label: str, text: str) -> None:
        self.page.get_by_label(label, exact=True).fill(text)

    def ask(self, question: str, answer: str) -> None:
        self.write("Question", question)
        self.press("Ask")
        self.shows("#answers .fp-best", answer)

    def fits(self) -> None:
        """Nothing sticks out on the right."""
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width

    def leave(self) -> None:
        self.context.close()
        assert self.errors == []
        assert self.requests
        assert [url for url in self.requests if not url.startswith((f"{self.url}/", "data:", "blob:"))] == []


class KeyboardVisitor(Visitor):
    """Somebody who uses the keyboard alone."""

    def reach(self, element: Any) -> None:
        for _ in range(80):
            if element.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{element} cannot be reached with the Tab key")

    def press(self, name: str, role: str = "button") -> None:
        self.reach(self.page.get_by_role(role, name=name, exact=True))
        self.page.keyboard.press("Enter")

    def write(self, label: str, text: str) -> None:
        self.reach(self.page.get_by_label(label, exact=True))
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)


@pytest.mark.parametrize(
    ("kind", "width", "scheme"), [(Visitor, 1280, "light"), (KeyboardVisitor, 390, "dark")], ids=["mouse", "keyboard"]
)
def test_a_fact_is_corrected_and_restored(
    browser: Any, service: Served, kind: type[Visitor], width: int, scheme: str
) -> None:
    visitor = kind(browser, service, width, scheme)
    visitor.log_in()
    visitor.ask(QUESTION.lower().rstrip("?"), BEFORE)
    visitor.fits()
    visitor.write("Correct answer", AFTER)
    visitor.press("Try the correction")
    visitor.shows("#result", f"It works: the model would say “{AFTER}”.")
    playwright.expect(visitor.page.locator("#compare")).to_be_in_viewport(timeout=WAIT)
    visitor.shows("#result .fp-card:has(h3:text-is('Before')) .fp-best", BEFORE)
    visitor.shows("#result .fp-card:has(h3:text-is('After')) .fp-best", AFTER)
    visitor.shows("#result", "Other wordings: 2 of 2 get the new answer")
    assert visitor.page.locator(".fp-cell").count() == 32, "one cell for each weight of the model"
    visitor.fits()
    assert service.said(QUESTION) == BEFORE, "nothing changes before the correction is accepted"
    visitor.press("Accept")
    visitor.shows("#result", "Accepted as fact")
    visitor.open()
    visitor.ask(QUESTION, AFTER)
    visitor.press("Accepted facts", role="tab")
    visitor.shows("#facts", QUESTION)
    visitor.fits()
    visitor.press("Verify all")
    visitor.shows("#report", "1 of 1 facts hold in all their wordings")
    (remove,) = visitor.page.get_by_role("button", name="Remove fact").all()
    visitor.press(remove.get_attribute("aria-label"))
    visitor.shows("#report", f"the model says “{BEFORE}” again")
    visitor.open()
    visitor.ask(QUESTION, BEFORE)
    visitor.leave()


def test_mistakes_are_explained_and_texts_are_not_run(browser: Any, service: Served) -> None:
    visitor = Visitor(browser, service, 1280, "light")
    visitor.log_in()
    visitor.press("Ask")
    visitor.shows("#answers", "Type a question first.")
    evil = "<img src=x onerror=document.title=1> {{7*7}} ${7*7}"
    visitor.write("Question", evil)
    visitor.press("Ask")
    visitor.shows("#answers .fp-asked", evil)
    visitor.write("Question", QUESTION)
    visitor.write("Correct answer", BEFORE)
    visitor.press("Try the correction")
    visitor.shows("#result .fp-error", "The model already says")
    wordings = visitor.page.get_by_label("Other wordings", exact=False)
    wordings.fill("Which town is Burundi's capital?")
    visitor.page.get_by_label("Use the accepted facts").click()
    visitor.shows("#answers .fp-best", BEFORE)
    assert wordings.input_value() == "Which town is Burundi's capital?", "what was typed stays"
    assert visitor.page.title() == "factpatch"
    assert not visitor.page.get_by_role("button", name="Accept", exact=True).is_visible()
    visitor.leave()
