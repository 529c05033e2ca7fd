"""The fact in the prompt: asked as written, measured like an edit, and never a patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from samples import answerer, revisions, write_revisions

from factpatch.data.revisions import Neighbour, edit_of, editable
from factpatch.editors.prompt import FactInPrompt
from factpatch.errors import InputError
from factpatch.evaluation import predicted_now
from factpatch.evaluation.forced import forced_accuracies
from factpatch.evaluation.prompted import PromptExaminer
from factpatch.facts import FactEdit, normalize, same
from factpatch.models import Causal, Seq2Seq, load_model


def test_the_form() -> None:
    edit = FactEdit("who leads france ?", "paris")
    assert FactInPrompt().prompts(edit, ["where ?"]) == ["who leads france ? paris. where ?"]
    own = FactInPrompt("new fact: {x} {a} || {input} now")
    assert own.prompts(edit, ["where ?"]) == ["new fact: who leads france ? paris || where ? now"]
    braces = FactEdit("what is {a} and {input} ?", "{x}")
    assert FactInPrompt().prompts(braces, ["{x} ?"]) == ["what is {a} and {input} ? {x}. {x} ?"]
    for form in ("{x} {input}", "{input} {x} {a} {a}", 3):
        with pytest.raises(InputError, match="expected a form with"):
            FactInPrompt(form)


@pytest.mark.parametrize("architecture", ["bert", "bart", "llama"])
def test_outcomes_are_those_of_prompted_answers(architecture: str) -> None:
    model = tiny.build(architecture)
    if isinstance(model, Seq2Seq | Causal):
        model.limit_answers(4)
    near = Neighbour("who leads africa ?", "")
    known = predicted_now(model, [replace(r, neighbours=(near,)) for r in revisions(model, 6)])
    method, edits = FactInPrompt("{x} {a} {input}"), editable(model, known)[:3]
    assert len(edits) == 3
    for revision, one in zip(edits, PromptExaminer(method, model, known).examine(edits), strict=True):
        edit = edit_of(revision)

        def ask(text: str, edit: FactEdit = edit) -> str:
            return model.predict([f"{edit.x} {edit.a} {text}"])[0]

        values = one.outcome.values
        assert values["success"] == same(ask(edit.x), edit.a)
        own = set(map(normalize, (edit.x, *revision.rephrases, *revision.human_rephrases)))
        kept = [same(ask(r.input), r.prediction) for r in known if normalize(r.input) not in own]
        assert values["retain"] == pytest.approx(np.mean(kept))
        assert values["retain_neighbours"] == same(ask(near.input), revision.neighbours[0].prediction)
        if model.kind == "classifier":
            assert values["forced_success"] is None
        else:
            asked = replace(revision, input=f"{edit.x} {edit.a} {edit.x}", rephrases=(), human_rephrases=())
            (forced,) = forced_accuracies(model, [[asked]])
            assert values["forced_success"] == forced[revision.id][asked.input]


def test_the_command_line(tmp_path: Path, run: Callable[..., Any]) -> None:
    model = answerer(tmp_path / "model")
    data = write_revisions(tmp_path / "data.jsonl", load_model(model, "cpu"), 12)
    common = ["--model", model, "--data", data, "--edits", 3, "--retain", 4, "--device", "cpu", "--method", "prompt"]
    result = run("evaluate", *common, "--output", tmp_path / "result", "--json").json
    assert result["edits"] == 3
    assert result["kl_mean"] is None
    assert 0 <= result["forced_success"] <= 1
    assert run("report", tmp_path / "result", "--output", tmp_path / "report").code == 0
    assert "Fact in the prompt" in (tmp_path / "report" / "table.md").read_text(encoding="utf-8")
    refused = run("evaluate", *common, "--output", tmp_path / "joint", "--together", "2")
    assert (refused.code, "changes no weights" in refused.err) == (1, True)
    assert "expected a form" in run("evaluate", *common, "--set", "form=x", "--output", tmp_path / "bad").err
