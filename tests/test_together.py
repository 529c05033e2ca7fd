"""Joint edits: what groups are measured, compared with hand-made groups, and runs that are killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Ran, loud_editor
from samples import read_lines, revisions

from factpatch.data.revisions import Revision, edit_of, own_forms
from factpatch.editors import GradientStep
from factpatch.errors import InputError
from factpatch.evaluation import MERGES, Together, evaluate, sample_edits
from factpatch.evaluation.outcomes import ControlInputs, outcome
from factpatch.evaluation.summary import Summary
from factpatch.evaluation.together import count_groups, count_joint_edits
from factpatch.facts import normalize
from factpatch.models import Seq2Seq, TaskModel
from factpatch.scope import FALSE_MATCHES, Scope


def many(model: TaskModel, count: int) -> tuple[list[Revision], list[Revision]]:
    known = [replace(r, id=f"{n}-{r.id}") for n in range(2) for r in revisions(model, 24, seed=n)]
    return sample_edits(model, known, count, 15, 0)


def test_groups_cover_a_fixed_number_of_edits() -> None:
    assert [count_groups(1000, size) for size in (1, 16, 64, 256, 1000)] == [256, 16, 4, 1, 1]
    assert count_groups(40, 16) == 2, "the rest do not fill a group"
    assert count_joint_edits(40, [1, 16]) == 40 + 32
    with pytest.raises(InputError, match="--together 64 needs 64 edits, found 40"):
        count_groups(40, 64)


@pytest.mark.parametrize("architecture", ["bert", "bart"])
def test_a_group_is_measured_under_the_sum_of_its_patches(architecture: str, tmp_path: Path) -> None:
    model = tiny.build(architecture)
    if isinstance(model, Seq2Seq):
        model.limit_answers(5)
    method = GradientStep(lr=0.3)
    edits, others = many(model, 7)
    result = evaluate(method, model, edits, others, tmp_path, {}, together=Together((1, 3)))
    assert result is not None
    assert [(point.facts, point.groups, point.result.edits) for point in result.curve] == [(1, 7, 7), (3, 2, 6)]
    lines = read_lines(tmp_path / "together.jsonl")
    assert [line["id"] for line in lines] == [r.id for r in [*edits, *edits[:6]]]
    keys = ("success", "retain", "equivalence")
    single = [[line[key] for key in keys] for line in read_lines(tmp_path / "edits.jsonl")]
    assert [[line[key] for key in keys] for line in lines[:7]] == single, "a group of one is a single edit"
    for k in range(2):
        group = edits[3 * k : 3 * k + 3]
        first, second, third = method.propose(model, [edit_of(revision) for revision in group])
        own = {form for revision in group for form in own_forms(revision)}
        kept = [other for other in others if normalize(other.input) not in own]
        with (first + second + third).applied(model):
            control_answers = model.predict([other.input for other in kept])
            for revision, line in zip(group, lines[7 + 3 * k :], strict=False):
                texts = [revision.input, *revision.rephrases, *revision.human_rephrases]
                answers = dict(zip(texts, model.predict(texts), strict=True))
                alone = outcome(revision, edit_of(revision).a, answers, ControlInputs(kept), control_answers)
                assert [line[key] for key in keys] == [alone.values[key] for key in keys]


def test_the_curve_in_json(tmp_path: Path) -> None:
    model = tiny.build("bert")
    edits, others = many(model, 8)
    result = evaluate(loud_editor(model), model, edits, others, tmp_path, {}, together=Together((2, 4)))
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert (saved["together"], saved["merge"]) == ([2, 4], "sum")
    keys = "success retain equivalence equivalence_human deterioration edits retain_inputs seconds facts groups"
    for point in saved["result"]["curve"]:
        assert point.keys() >= {*keys.split(), "intervals"}
        low, high = point["intervals"]["success"]
        assert low <= point["success"] <= high
    assert Summary.read(tmp_path).result == result


class Killed(BaseException):
    pass


def test_a_killed_run_resumes_after_the_last_whole_group(tmp_path: Path) -> None:
    model = tiny.build("bert")
    editor = loud_editor(model)
    edits, others = many(model, 10)
    together = Together((1, 3))
    whole = evaluate(editor, model, edits, others, tmp_path / "whole", {}, together=together)
    seen: list[int] = []

    def kill(count: int) -> None:
        seen.append(count)
        if sum(seen) >= 10 + 10 + 3:
            raise Killed

    with pytest.raises(Killed):
        evaluate(editor, model, edits, others, tmp_path / "killed", {}, kill, together)
    part = tmp_path / "killed" / ".together.jsonl.part"
    part.write_text(part.read_text() + part.read_text().splitlines()[-1] + "\n" + '{"half')
    seen = []
    resumed = evaluate(editor, model, edits, others, tmp_path / "killed", {}, seen.append, together)
    assert seen == [10, 10 + 3, 3, 3]
    assert resumed is not None
    assert whole is not None
    for ours, theirs in zip(resumed.curve, whole.curve, strict=True):
        assert replace(ours.result, seconds=0) == replace(theirs.result, seconds=0)
    assert (tmp_path / "killed" / "together.jsonl").exists()
    assert not list((tmp_path / "killed").glob("*.part*"))


def test_another_way_of_merging_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the patches of a group, and other inputs to be fitted to."""
    model = tiny.build("bert")
    edits, others = many(model, 4)
    seen = []

    def first(model: TaskModel, fitted_to: Any, scope: Any) -> Any:
        def measure(examiner: Any, patches: Any, group: Any) -> Any:
            seen.append((len(patches), len(group), len(fitted_to)))
            return MERGES["sum"](model, fitted_to, scope)(examiner, patches[:1], group)

        return measure

    monkeypatch.setitem(MERGES, "first", first)
    evaluate(loud_editor(model), model, edits, others, tmp_path, {}, together=Together((2,), "first", others[:3]))
    assert seen == [(2, 2, 3)] * 2
    with pytest.raises(InputError, match="no merge called 'mean'; choose one of sum"):
        Together((2,), "mean")


@pytest.mark.parametrize(("options", "share"), [(["--false-matches", "0.4"], 0.4), ([], FALSE_MATCHES)])
def test_the_share_of_false_matches(
    options: list[str],
    share: float,
    checker: Path,
    claims: Path,
    tmp_path: Path,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scope's threshold is chosen for it, among the inputs that the scope is fitted to."""
    shares = []
    calibrate = Scope.calibrate_index
    monkeypatch.setattr(Scope, "calibrate_index", lambda own, others, s: (shares.append(s), calibrate(own, others, s)))
    command = ["--model", checker, "--data", claims, "--method", "gradient", "--edits", 4, "--device", "cpu"]
    ran = run("evaluate", *command, "--together", "2", "--merge", "scope", *options, "--output", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert shares == [share] * 2


def test_too_many_together_is_found_at_once(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    options = ["--model", checker, "--data", claims, "--method", "gradient", "--edits", 5, "--device", "cpu"]
    ran = run("evaluate", *options, "--together", "8", "--output", tmp_path / "run")
    assert ran.code == 1
    assert "--together 8 needs 8 edits, found 5" in ran.err
