"""A decoder through every command: fitted with a template, edited, evaluated, patched, and kept in a ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from conftest import Ran
from samples import read_lines, texts, write_lines

from factpatch.editors import GradientStep
from factpatch.errors import MismatchError
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.models import Causal
from factpatch.patch import Patch

TEMPLATE = "what is {} ?"
SMALL = ("--set", "editor.width=64", "--set", "editor.bottleneck=16", "--set", "editor.lstm=8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random decoder, without recorded settings, and facts about it."""
    folder = tmp_path_factory.mktemp("decoder")
    model = tiny.build("llama", initializer_range=0.1)
    model.model.save_pretrained(folder / "base")
    model.tokenizer.save_pretrained(folder / "base")
    facts = [
        {
            "id": str(i),
            "input": text,
            "output": text.split()[0],
            "rephrases": [f"the {text}", f"{text} ?"],
            "human_rephrases": [f"a {text}"],
        }
        for i, text in enumerate(texts(60))
    ]
    write_lines(folder / "facts.jsonl", facts)
    return folder


def test_from_fitting_to_a_report(runs: Path, run: Callable[..., Ran]) -> None:
    model, facts, revisions = runs / "model", runs / "facts.jsonl", runs / "revisions.jsonl"
    fitted = ("--task", "answer", "--template", TEMPLATE, "--steps", 40, "--lr", 1e-3)
    found = run("fit", "--model", runs / "base", "--train", facts, "--output", model, *fitted, "--json").json
    assert found["held_out_exact_match"] is not None
    assert json.loads((model / "decoder.json").read_text())["template"] == TEMPLATE

    found = run("revise", "--model", model, "--data", facts, "--output", revisions, "--json").json
    assert found["kept"] == 60
    assert read_lines(revisions)[0]["provenance"]["settings"]["template"] == TEMPLATE

    steps = ("--steps", 6, *SMALL)
    found = run("train", "--model", model, "--train", revisions, "--output", runs / "editor", *steps, "--json").json
    assert found["steps"] == 6
    used = ("--model", model, "--editor", runs / "editor")
    sizes = ("--edits", 4, "--retain", 6)
    found = run("evaluate", *used, "--data", revisions, *sizes, "--output", runs / "results", "--json").json
    assert found["edits"] == 4
    assert found["kl_mean"] is not None
    assert (run("report", runs / "results", "--output", runs / "report")).code == 0

    (runs / "edits.jsonl").write_text(
        "".join(json.dumps({"input": text, "target": "gitega"}) + "\n" for text in ("lake", "who leads france ?"))
    )
    edited = ("--facts", runs / "edits.jsonl", "--save", runs / "patches", "--keep-failed")
    assert run("edit", *used, *edited, "--json").json["bad"] == 0
    patches = sorted((runs / "patches").iterdir())
    assert run("patch", "show", patches[0], "--json").json["template"] == TEMPLATE
    merged = ("--model", model, "--others", revisions, "--output", runs / "merged.safetensors")
    assert run("patch", "merge", *patches, *merged).code == 0
    applied = run("patch", "apply", runs / "merged.safetensors", "--model", model, "--output", runs / "new", "--force")
    assert applied.code == 0, applied.err
    assert run("ask", "--model", runs / "new", "lake", "--json").json["answers"]

    scope = ("--data", revisions, "--output", runs / "scope.safetensors", "--steps", 2)
    assert run("scope", "train", "--model", model, *scope).code == 0


def test_another_template_is_refused_everywhere(runs: Path, run: Callable[..., Ran]) -> None:
    base, revisions = runs / "base", runs / "chat.jsonl"
    revised = ("--model", base, "--data", runs / "facts.jsonl", "--output", revisions)
    assert run("revise", *revised, "--template", TEMPLATE).code == 0
    for template in ((), ("--template", "who leads {} ?")):
        ran = run("train", "--model", base, "--train", revisions, "--output", runs / "none", "--steps", 1, *template)
        assert ran.code == 1
        assert f"made with the template {TEMPLATE!r}" in ran.err
        assert not (runs / "none").exists()


def test_a_ledger_of_a_decoders_facts(tmp_path: Path) -> None:
    model = tiny.build("gpt2-lm")
    assert isinstance(model, Causal)
    model.set_template(TEMPLATE, answer_tokens=2)
    edits = [FactEdit("who leads france ?", "paris")]
    steps = (GradientStep(lr=lr) for lr in (0.1, 0.3, 1.0, 3.0))
    method = next(step for step in steps if all(_succeeds(model, patch) for patch in step.propose(model, edits)))
    with Ledger(tmp_path / "facts.db", model, texts(30, seed=5)) as ledger:
        ledger.add(method, edits)
        patch = ledger.patch()
    assert patch.template == TEMPLATE
    with patch.applied(model):
        assert model.predict([edits[0].x]) == ["paris"]
    assert model.predict([edits[0].x]) != ["paris"]
    model = tiny.build("gpt2-lm")
    with pytest.raises(MismatchError, match=r"the ledger .* was made with the template"):
        Ledger(tmp_path / "facts.db", model)


def _succeeds(model: Causal, patch: Patch) -> bool:
    (edit,) = patch.edits
    return model.predict_patched([patch], [edit.x]) == [edit.a]
