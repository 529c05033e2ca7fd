"""The service through its HTTP API: answers, proposals, facts, downloads, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import texts
from test_ledger import OTHERS, Guess

from factpatch import export
from factpatch.data.revisions import Revision
from factpatch.errors import FileError
from factpatch.ledger import Ledger
from factpatch.models import TaskModel
from factpatch.patch import Patch
from factpatch.scope import Scope
from factpatch.serve.answering import Ask
from factpatch.serve.limits import BODY_BYTES, Limits, RateLimiter
from factpatch.serve.questions import Questions
from factpatch.serve.service import Service

pytest.importorskip("fastapi", reason="the extra web is not installed")
from fastapi.testclient import TestClient

from factpatch.serve.api import create_api
from factpatch.serve.guard import Guard

TOKEN = "a token that nobody guesses"
X, *MORE = texts(40, seed=6)
FEW = 8  # control questions


@pytest.fixture(scope="module")
def model() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture
def service(model: TaskModel, tmp_path: Path) -> Iterator[Service]:
    Ledger(tmp_path / "facts.db", model, OTHERS).close()
    revisions = [Revision(str(n), text, "", (), (), (), ()) for n, text in enumerate(OTHERS)]
    scope = Scope.plain(model, revisions, false_matches=0.0)
    questions = Questions([[text] for text in OTHERS], OTHERS[:FEW])
    service = Service(model, Guess(), tmp_path / "facts.db", scope, questions, Limits(requests_per_minute=10_000))
    yield service
    service.close()


def test_a_busy_service_can_be_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    while service._worker._free.acquire(blocking=False):
        pass  # as if that many requests were waiting
    closed: list[str] = []
    monkeypatch.setattr(service._ledger, "close", lambda: closed.append("ledger"))
    service.close()
    assert closed == ["ledger"]


def client_of(service: Service, token: str | None = None, per_minute: int = 10_000, **options: Any) -> TestClient:
    app = Guard(create_api(service), RateLimiter(per_minute), token)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False, **options)


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


def other_label(model: TaskModel, x: str) -> str:
    return model.candidates([x], count=2)[0][1]


def proposed(client: TestClient, model: TaskModel, x: str = X, **more: Any) -> dict[str, Any]:
    sent = {"question": x, "target": other_label(model, x), **more}
    answer = client.post("/api/propose", json=sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def accepted(client: TestClient, model: TaskModel, x: str = X, **more: Any) -> dict[str, Any]:
    answer = client.post("/api/accept", json={"id": proposed(client, model, x)["id"], **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(client: TestClient, x: str = X, **more: Any) -> str:
    return client.post("/api/ask", json={"question": x, **more}).json()["answers"][0]["text"]


def problem(answer: Any, status: int, text: str) -> None:
    """The answer is a JSON error with this status, and its message names no file and no code."""
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    message = answer.json()["error"]
    assert re.search(text, message), message
    assert not re.search(r"/\w+/\w+|Traceback|\.py|line \d+", message), message


# Asking, proposing, accepting, removing


def test_answers_come_with_probabilities(client: TestClient, model: TaskModel) -> None:
    found = client.post("/api/ask", json={"question": f"  {X} "}).json()
    assert (found["question"], found["fact"]) == (X, None)
    assert [one["text"] for one in found["answers"]] == model.candidates([X], count=5)[0]
    shares = [one["probability"] for one in found["answers"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)


def test_a_proposal_shows_before_and_after(client: TestClient, model: TaskModel) -> None:
    found = proposed(client, model, paraphrases=[MORE[0], MORE[1], X])
    assert found["success"]
    assert found["question"]["changed"]
    assert found["question"]["before"][0]["text"] == model.predict([X])[0]
    assert found["question"]["after"][0]["text"] == other_label(model, X)
    assert [one["question"] for one in found["paraphrases"]] == MORE[:2], "the question itself is not a paraphrase"
    assert [one["question"] for one in found["controls"]] == list(OTHERS[:FEW])
    patch_file = client.get(f"/api/proposals/{found['id']}/patch")
    assert patch_file.status_code == 200
    assert len(found["weights"]) == 4
    assert all(one["size"] > 0 for one in found["weights"])


def test_a_downloaded_patch_gives_the_answers_that_were_shown(
    client: TestClient, model: TaskModel, tmp_path: Path
) -> None:
    found = proposed(client, model)
    (tmp_path / "one.safetensors").write_bytes(client.get(f"/api/proposals/{found['id']}/patch").content)
    with Patch.load(tmp_path / "one.safetensors").applied(model):
        assert model.predict([X])[0] == found["question"]["after"][0]["text"]
        controls = [one["question"] for one in found["controls"]]
        assert model.predict(controls) == [one["after"] for one in found["controls"]]


def test_accepted_facts_are_used_until_they_are_removed(client: TestClient, model: TaskModel) -> None:
    before, target = said(client), other_label(model, X)
    fact = accepted(client, model, note="from the atlas")
    assert (fact["x"], fact["before"], fact["target"], fact["note"]) == (X, before, target, "from the atlas")
    assert said(client) == target
    assert said(client, with_facts=False) == before
    assert client.post("/api/ask", json={"question": X.upper()}).json()["fact"]["id"] == fact["id"]
    assert client.get("/api/facts", params={"search": "atlas"}).json()["facts"] == [fact]
    assert client.get("/api/facts", params={"search": "nothing like it"}).json()["facts"] == []
    assert client.post("/api/facts/verify").json()["holding"] == [fact]
    assert client.delete(f"/api/facts/{fact['id']}").json()["status"] == "removed"
    assert said(client) == before
    assert client.get("/api/facts").json()["facts"] == []
    history = client.get(f"/api/facts/{fact['id']}").json()["history"]
    assert [event["event"] for event in history] == ["added", "removed"]
    problem(client.delete(f"/api/facts/{fact['id']}"), 422, "already removed")


def test_what_was_tried_is_what_is_recorded(client: TestClient, model: TaskModel, tmp_path: Path) -> None:
    found = proposed(client, model)
    (tmp_path / "tried.safetensors").write_bytes(client.get(f"/api/proposals/{found['id']}/patch").content)
    fact = client.post("/api/accept", json={"id": found["id"]}).json()
    (tmp_path / "recorded.safetensors").write_bytes(client.get(f"/api/facts/{fact['id']}/patch").content)
    assert Patch.load(tmp_path / "tried.safetensors") == Patch.load(tmp_path / "recorded.safetensors")


def test_a_fact_cannot_be_changed_back_by_another_fact(client: TestClient, model: TaskModel) -> None:
    before = said(client)
    fact = accepted(client, model)
    answer = client.post("/api/propose", json={"question": X, "target": before})
    problem(answer, 422, f"remove fact {fact['id']}")
    answer = client.post("/api/propose", json={"question": X, "target": fact["target"]})
    problem(answer, 422, f"already accepted as fact {fact['id']}")


def test_a_fact_can_be_replaced(client: TestClient, model: TaskModel) -> None:
    first = accepted(client, model)
    third = model.candidates([X], count=3)[0][2]
    proposal = client.post("/api/propose", json={"question": X, "target": third}).json()
    assert proposal["question"]["before"][0]["text"] == first["target"], "as the service answers now"
    client.post("/api/accept", json={"id": proposal["id"]})
    assert said(client) == third
    facts = client.get("/api/facts", params={"all": True}).json()["facts"]
    assert [(fact["target"], fact["status"]) for fact in facts] == [(third, "active"), (first["target"], "replaced")]


def test_a_failed_correction_is_not_accepted(service: Service, client: TestClient, model: TaskModel) -> None:
    service.editor = Guess(tries=0)  # a patch that changes nothing
    found = proposed(client, model)
    assert not found["success"]
    problem(client.post("/api/accept", json={"id": found["id"]}), 422, "does not work")
    assert client.get("/api/facts").json()["facts"] == []


def test_nobody_sees_the_proposals_of_others(service: Service, client: TestClient, model: TaskModel) -> None:
    found, other = proposed(client, model), proposed(client_of(service), model, MORE[0])
    assert len({found["id"], other["id"]}) == 2
    assert all(len(one["id"]) >= 32 for one in (found, other))
    assert said(client_of(service)) == model.predict([X])[0], "a proposal changes no answer"
    for address in ("/api/facts", "/api/facts?all=true", "/api/proposals", "/openapi.json"):
        assert found["id"] not in client_of(service).get(address).text
    assert client.post("/api/accept", json={"id": found["id"]}).json()["x"] == X
    problem(client.post("/api/accept", json={"id": found["id"]}), 404, "no such proposal")
    assert client.post("/api/discard", json={"id": other["id"]}).json() == {"discarded": True}
    problem(client.post("/api/accept", json={"id": other["id"]}), 404, "no such proposal")


def test_downloads(client: TestClient, model: TaskModel, tmp_path: Path) -> None:
    problem(client.get("/api/download/patch"), 422, "no accepted facts")
    fact = accepted(client, model)
    (tmp_path / "all.safetensors").write_bytes(client.get("/api/download/patch").content)
    assert [edit.x for edit in Patch.load(tmp_path / "all.safetensors").edits] == [X]
    (tmp_path / "copy.db").write_bytes(client.get("/api/download/ledger").content)
    with Ledger(tmp_path / "copy.db", model) as copy:
        assert [one.id for one in copy.facts()] == [fact["id"]]
    assert "exactly as the merged patch" in adapter_readme(client.get("/api/download/adapter"))


def adapter_readme(answer: Any) -> str:
    """README.md in a downloaded adapter."""
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} < set(archive.namelist())
        return archive.read("adapter/README.md").decode()


def test_an_adapter_of_a_rank_that_no_server_accepts_is_truncated(
    client: TestClient, model: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted(client, model)
    monkeypatch.setattr(export, "RANKS", (1, 2))
    found = adapter_readme(client.get("/api/download/adapter"))
    assert "Its rank is 2." in found
    assert re.search(r"its change was truncated: \d+\.\d\d% of the squared norm is left", found)
    assert re.search(r"100\.0% of the facts hold with the patch, \d+\.\d% with this adapter", found)
    assert "Its rank is 1." in adapter_readme(client.get("/api/download/adapter?rank=1"))
    problem(client.get("/api/download/adapter?rank=3"), 422, "expected a rank among 1, 2, found 3")
    problem(client.get("/api/download/adapter?rank=x"), 422, "rank: ")


# Refusals


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x"])
def test_a_wrong_token_is_refused(service: Service, header: str | None) -> None:
    headers = {"Authorization": header} if header else {}
    client = client_of(service, TOKEN)
    answer = client.post("/api/ask", json={"question": X}, headers=headers)
    problem(answer, 401, "token is missing or wrong")
    problem(client.get("/openapi.json", headers=headers), 401, "token")


def test_the_right_token_is_accepted_as_a_header_and_as_a_login(service: Service) -> None:
    client = client_of(service, TOKEN, follow_redirects=False)
    assert client.get("/api/facts", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/docs", headers={"Accept": "text/html"}).headers["location"] == "/login"
    assert 'name="token"' in client.get("/login").text
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    assert client.get("/api/facts").status_code == 401
    login = client.post("/login", data={"token": TOKEN})
    assert login.status_code == 303
    assert "httponly" in login.headers["set-cookie"].lower()
    assert TOKEN not in login.headers["set-cookie"]
    assert client.get("/api/facts").status_code == 200


def test_an_oversized_body_is_refused(client: TestClient) -> None:
    large = b"x" * (BODY_BYTES + 1)
    problem(client.post("/api/ask", content=large), 413, "larger than 64 KiB")
    problem(client.post("/api/ask", content=iter([large])), 413, "larger than 64 KiB")  # without a declared length


@pytest.mark.parametrize("body", ["{", "", "nonsense", '{"question": }', b"\xff\xfe"])
def test_malformed_json_is_refused(client: TestClient, body: str | bytes) -> None:
    answer = client.post("/api/ask", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]


def test_unknown_ids_are_refused(client: TestClient) -> None:
    problem(client.post("/api/accept", json={"id": "unknown"}), 404, "no such proposal")
    problem(client.post("/api/discard", json={"id": "unknown"}), 404, "no such proposal")
    problem(client.get("/api/proposals/unknown/patch"), 404, "no such proposal")
    problem(client.get("/api/facts/7"), 404, "no fact 7")
    problem(client.delete("/api/facts/7"), 404, "no fact 7")
    problem(client.get("/api/facts/7/patch"), 404, "no fact 7")
    problem(client.delete(f"/api/facts/{10**30}"), 404, "no fact")
    problem(client.get("/api/facts/seven"), 422, "fact")
    problem(client.get("/api/nothing"), 404, "no such address")


def test_ten_thousand_characters_are_refused(client: TestClient) -> None:
    long = "why " * 2500
    for address, sent in (
        ("/api/ask", {"question": long}),
        ("/api/propose", {"question": long, "target": "paris"}),
        ("/api/propose", {"question": X, "target": long}),
        ("/api/propose", {"question": X, "target": "paris", "paraphrases": [long]}),
        ("/api/accept", {"id": "unknown", "note": long}),
    ):
        problem(client.post(address, json=sent), 422, "at most")


def test_a_question_that_the_model_cannot_read_fails_alone(service: Service, model: TaskModel) -> None:
    long, good = (service._worker.submit(service._asks, Ask(text, True)) for text in ("why " * 60, X))
    assert good.result().answers[0].text == model.predict([X])[0]
    problem(client_of(service).post("/api/ask", json={"question": "why " * 60}), 422, "reads at most")
    assert long.exception() is not None


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"question": " "},
        {"question": 7},
        {"question": X, "colour": "red"},
        {"question": "\ud800"},
    ],
)
def test_other_bad_requests_are_refused(client: TestClient, sent: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/api/ask", content=json.dumps(sent), headers=headers)
    problem(answer, 422, "question|colour")


def test_unknown_labels_are_refused(client: TestClient) -> None:
    problem(client.post("/api/propose", json={"question": X, "target": "green"}), 422, "has no label")


def test_other_hosts_are_refused_without_a_token(service: Service) -> None:
    # A page elsewhere could otherwise reach this service by pointing its own name at 127.0.0.1.
    problem(client_of(service).get("/api/facts", headers={"Host": "evil.example"}), 403, "own machine only")
    headers = {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
    assert client_of(service, TOKEN).get("/api/facts", headers=headers).status_code == 200


def test_too_many_requests_are_refused(service: Service) -> None:
    client = client_of(service, per_minute=3)
    answers = [client.get("/api/facts") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    problem(answers[-1], 429, "try again in")
    assert int(answers[-1].headers["retry-after"]) > 0


def test_a_full_queue_is_refused(service: Service, model: TaskModel) -> None:
    started, go_on = threading.Event(), threading.Event()
    service._worker.call(lambda: (started.set(), go_on.wait(60)))
    started.wait(60)
    waiting = [service._worker.submit(service._asks, Ask(X, True)) for _ in range(service.limits.queue - 1)]
    answer = client_of(service).post("/api/ask", json={"question": X})
    go_on.set()
    problem(answer, 503, "busy")
    assert answer.headers["retry-after"]
    assert {future.result().answers[0].text for future in waiting} == {model.predict([X])[0]}


def test_errors_say_nothing_about_files(service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (FileError("/home/me/secret.db is damaged"), sqlite3.Error("/home/me"), RuntimeError("/home/me")):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(service._ledger, "facts", fail)
        problem(client.get("/api/facts"), 500, "see its log")


def test_a_ledger_in_use(service: Service, client: TestClient, model: TaskModel, tmp_path: Path) -> None:
    """The status says that another try may work; the message says nothing about files."""
    address = f"/api/facts/{accepted(client, model)['id']}"
    service._worker.call(lambda: service._ledger.store.db.execute("PRAGMA busy_timeout = 10")).result()
    with closing(sqlite3.connect(tmp_path / "facts.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        problem(client.delete(address), 503, "another program uses the ledger; try again")
    assert client.delete(address).json()["status"] == "removed"


def test_the_reference_needs_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert "/api/propose" in page.text
    assert "<script" not in page.text
    assert not re.findall(r"(?:src|href)=\"https?://", page.text)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/api/ask", "/api/propose", "/api/accept", "/api/facts", "/api/facts/verify"} <= paths.keys()
