"""Numbers at their limits: weights that are not finite, half precision, no edits, very short and very long inputs."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, Ran, assert_untouched, loud_editor, weights_of
from samples import claims, fact_checker, revisions, write_lines, write_revisions

from factpatch.covariance import Covariance
from factpatch.data.revisions import Revision
from factpatch.data.targets import with_targets
from factpatch.editors import HyperNetwork, Looped
from factpatch.errors import InputError, MismatchError, ModelError
from factpatch.evaluation import sample_edits
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.merging import merge, scaled_patch
from factpatch.models import TaskModel, load_model

LONG = "paris " * 10_000


@pytest.fixture
def bert() -> TaskModel:
    return tiny.build("bert")


# Values that are not finite


@pytest.mark.parametrize("architecture", ["bert", "bart", "gpt2-lm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_whose_weights_are_not_finite(architecture: str, value: float, tmp_path: Path) -> None:
    model = tiny.build(architecture)
    with torch.no_grad():
        next(iter(model.layers.values())).weight.fill_(value)
    model.save(tmp_path / "model")
    with pytest.raises(ModelError, match="not finite"):
        load_model(tmp_path / "model", "cpu")


def test_a_patch_that_overflows_half_precision(bert: TaskModel) -> None:
    """A change that float32 holds is refused if a weight in float16 does not; the weights stay as they were."""
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]))
    (patch,) = loud_editor(bert).propose(bert, [edit])
    most = max(float(delta.dense().abs().max()) for delta in patch.deltas.values())
    large = scaled_patch(patch, 1e6 / most)
    with large.applied(bert):
        pass
    bert.cast(torch.float16)
    before = weights_of(bert)
    with pytest.raises(MismatchError, match="not be finite"):
        large.apply(bert)
    assert_untouched(bert, before)


# No edits, short and long inputs


def test_nothing_to_do(bert: TaskModel, tmp_path: Path) -> None:
    editor = loud_editor(bert)
    before = weights_of(bert)
    assert editor.propose(bert, []) == []
    assert Looped(editor).propose(bert, []) == []
    assert bert.predict([]) == []
    assert bert.predict_patched([], []) == []
    with pytest.raises(InputError, match="found none"):
        merge(bert, [], ["paris"])
    with Ledger(tmp_path / "facts.db", bert, ["paris"]) as ledger:
        assert ledger.add(editor, []) == []
        assert ledger.patch().deltas == {}
        assert ledger.verify().verdicts == []
    assert_untouched(bert, before)


def test_one_token(model: TaskModel, editor: HyperNetwork) -> None:
    edit = FactEdit("paris", tiny.other_answer(model, "paris"))
    (patch,) = editor.propose(model, [edit])
    assert patch.rank <= len(model.encode(["paris"])[0]["input_ids"]) + 1 + len(model.encode([edit.a])[0]["input_ids"])
    (answer,) = model.predict_patched([patch], ["paris"])
    with patch.applied(model):
        assert model.predict(["paris"]) == [answer]


def test_ten_thousand_tokens(model: TaskModel, editor: HyperNetwork) -> None:
    for use in (
        lambda: model.predict([LONG]),
        lambda: editor.propose(model, [FactEdit(LONG, tiny.other_answer(model, "paris"))]),
        lambda: editor.propose(model, [FactEdit("paris", LONG)]),
    ):
        with pytest.raises(InputError):
            use()
    assert len(model.predict([LONG, "paris"], cut=True)) == 2


# Large files


class Lazy:
    """Revisions that exist only while they are used, as those of a file, and how many existed at a time."""

    def __init__(self, known: list[Revision]):
        self.known = known
        self.alive: weakref.WeakSet[Revision] = weakref.WeakSet()
        self.most = 0

    def __iter__(self) -> Iterator[Revision]:
        for revision in self.known:
            copy = replace(revision)
            self.alive.add(copy)
            self.most = max(self.most, len(self.alive))
            yield copy


@pytest.mark.parametrize("targets", ["beam", "gold", "relation"])
def test_a_sample_holds_few_revisions_in_memory(targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is that of `random.sample` among all revisions, as results that were published depend on it."""
    monkeypatch.setattr("factpatch.evaluation.run.CHUNK", 7)
    model = tiny.build("bart")
    known = [replace(r, answers=(QUESTIONS[i % 3].split()[0],)) for i, r in enumerate(revisions(model, 50))]
    lazy = Lazy(known)
    edits, others = sample_edits(model, lazy, 5, 8, 3, targets)
    rng = random.Random(3)
    candidates = with_targets(model, known, [targets], 3)
    assert edits == rng.sample(candidates, len(candidates))[:5]
    assert others == rng.sample(known, len(known))[:8]
    assert lazy.most <= 2 * 7 + 5 + 8


def test_evaluate_from_a_file_and_from_a_pipe(given: Path, run: Callable[..., Ran], tmp_path: Path) -> None:
    """A file is read again instead of being held in memory; its bad lines count once. A pipe is read only once."""
    lines = [*(given / "revisions.jsonl").read_text().splitlines(), "bad"]
    (tmp_path / "file.jsonl").write_text("\n".join(lines))
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("\n".join(lines)), daemon=True)
    writer.start()
    about = ("--model", given / "model", "--device", "cpu", "--editor", given / "editor", "--skip-bad", "--json")
    found = []
    for path in (tmp_path / "file.jsonl", pipe):
        size = ("--edits", 4, "--retain", 6)
        ran = run("evaluate", *about, "--data", path, *size, "--output", tmp_path / f"{path.stem}-results")
        assert ran.code == 0, ran.err
        assert ran.err.count("no provenance record") == 1
        found.append(json.loads(ran.out))
    assert found[0]["bad"] == found[1]["bad"] == 1
    one, two = (bytes_in(tmp_path / f"{name}-results") for name in ("file", "pipe"))
    assert one == two


# The same seed gives the same bytes


def bytes_in(folder: Path) -> dict[str, bytes]:
    """The safetensors files and lines of a folder, without those that contain durations."""
    wanted = (path for path in sorted(folder.rglob("*")) if path.suffix in (".safetensors", ".jsonl"))
    return {path.name: path.read_bytes() for path in wanted if path.name != "metrics.jsonl"}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    fact_checker(folder / "model")
    write_lines(folder / "claims.jsonl", claims(40))
    write_revisions(folder / "revisions.jsonl", load_model(folder / "model", "cpu"), 30)
    loud_editor(load_model(folder / "model", "cpu")).save(folder / "editor")
    return folder


SETTINGS = ("edits=4", "rows=4", "validations=1", "validation_edits=2", "validation_inputs=2", "editor.width=16")


@pytest.mark.parametrize("command", ["fit", "train", "revise", "evaluate", "scope"])
def test_the_same_seed_gives_the_same_bytes(command: str, given: Path, run: Callable[..., Ran], tmp_path: Path) -> None:
    on = ("--model", given / "model", "--device", "cpu")
    small = [part for setting in SETTINGS for part in ("--set", setting)]
    commands: dict[str, tuple[Any, ...]] = {
        "fit": ("fit", *on, "--train", given / "claims.jsonl", "--steps", 5, "--batch", 8),
        "train": ("train", *on, "--train", given / "revisions.jsonl", "--steps", 3, *small),
        "revise": ("revise", *on, "--data", given / "claims.jsonl"),
        "evaluate": ("evaluate", *on, "--data", given / "revisions.jsonl", "--editor", given / "editor", "--edits", 4),
        "scope": ("scope", "train", *on, "--data", given / "revisions.jsonl", "--steps", 5),
    }
    output = {"revise": "out.jsonl", "scope": "out.safetensors"}.get(command, "run")
    for folder in ("one", "two"):
        assert run(*commands[command], "--seed", 7, "--output", tmp_path / folder / output).code == 0
    one, two = bytes_in(tmp_path / "one"), bytes_in(tmp_path / "two")
    assert one
    assert one == two


def test_metadata_has_the_same_order_every_time(bert: TaskModel, tmp_path: Path) -> None:
    """Rust's hash tables, with which safetensors writes metadata, order keys at random."""
    covariance = Covariance.compute(bert, QUESTIONS)
    for number in range(8):
        covariance.save(tmp_path / str(number))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
