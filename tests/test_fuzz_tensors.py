"""Fuzzing of patches, editors, checkpoints, scopes, covariances and ledgers: only our own errors come out."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, loud_editor
from fuzzing import (
    JSON,
    NUMBERS,
    OURS,
    TENSORS,
    TEXTS,
    VALUES,
    changed,
    damages,
    fuzzed,
    only_our_errors,
    st,
    write_changed,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from samples import revisions, texts

from factpatch.covariance import Covariance
from factpatch.editors import create_method, load_editor
from factpatch.facts import FactEdit
from factpatch.ledger import Ledger
from factpatch.ledger_store import pack
from factpatch.merging import merge
from factpatch.models import HELD_OUT, Causal, TaskModel, load_model
from factpatch.patch import Patch, checksum
from factpatch.scope import Scope, ScopeConfig
from factpatch.scope.comparer import Comparer
from factpatch.scope.matching import Matcher
from factpatch.training.checkpoint import load_checkpoint, save_checkpoint

NEW = st.none() | TENSORS | JSON


@pytest.fixture(scope="module")
def bert() -> TaskModel:
    return tiny.build("bert", hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, bert: TaskModel) -> Path:
    """A folder with one intact file of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    editor = loud_editor(bert)
    editor.save(folder / "editor")
    edit = FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]))
    editor.propose(bert, [edit])[0].save(folder / "patch")
    Patch({}, bert.fingerprint, "stub", (edit,)).save(folder / "small patch")
    covariance = Covariance.compute(bert, texts(20))
    covariance.save(folder / "covariance")
    Scope.plain(bert, revisions(bert, 12)).save(folder / "scope")
    scope = Scope.train(bert, revisions(bert, 12), ScopeConfig(compare=False, steps=2))
    scope.matcher = Matcher(Comparer(len(scope.mean)), floor=0.1)
    scope.save(folder / "scope with a comparer")
    with Ledger(folder / "ledger", bert, covariance=covariance) as ledger:
        ledger.add(create_method("finetune", lr=0.05), [edit])
        ledger.patch()
        ledger.store.db.execute("PRAGMA journal_mode = DELETE")  # one file
    save_checkpoint(folder / "checkpoint", 3, {"best": {"w": torch.zeros(2, 2)}}, {"step": 3, "metrics": [{"a": 1}]})
    return folder


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


# Patches


@fuzzed(name=st.sampled_from(["patch", "small patch"]), damage=damages())
def test_damaged_patches(part: int, whole: Path, name: str, damage: Any) -> None:
    with only_our_errors() as folder:
        (folder / "file").write_bytes(damage((whole / name).read_bytes()))
        Patch.load(folder / "file")


@fuzzed(number=OURS, new=NEW)
def test_forged_patches(part: int, whole: Path, bert: TaskModel, number: int, new: Any) -> None:
    """The checksum is right, as somebody who means harm would make it."""
    with only_our_errors() as folder:
        path = folder / "file"
        write_changed(path, load_file(whole / "patch"), metadata_of(whole / "patch"), number, new)
        if path.exists():
            metadata, tensors = metadata_of(path), load_file(path)
            metadata.pop("checksum", None)
            save_file(tensors, path, {**metadata, "checksum": checksum(metadata, tensors)})
            patch = Patch.load(path)
            assert repr(patch)
            patch.norm()
            with patch.applied(bert):
                bert.predict(QUESTIONS[:1])


# Editors and checkpoints


@fuzzed(number=OURS, new=VALUES, damage=st.none() | damages())
def test_editor_settings(part: int, whole: Path, bert: TaskModel, number: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        shutil.copytree(whole / "editor", folder / "editor")
        path = folder / "editor" / "config.json"
        found = changed({**json.loads(path.read_text()), "extra": None}, number, new)
        found.pop("checksum", None)  # so that the first check does not end every case
        content = json.dumps(found).encode()
        path.write_bytes(damage(content) if damage else content)
        load_editor(folder / "editor", torch.device("cpu")).check_fits(bert)


@fuzzed(number=OURS, new=st.none() | TENSORS, damage=st.none() | damages())
def test_editor_weights(part: int, whole: Path, bert: TaskModel, number: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        shutil.copytree(whole / "editor", folder / "editor")
        config, path = folder / "editor" / "config.json", folder / "editor" / "editor.safetensors"
        found = json.loads(config.read_text())
        del found["checksum"]
        config.write_text(json.dumps(found))
        write_changed(path, load_file(path), {"a": "b", "c": "d"}, number, new)
        if damage:
            path.write_bytes(damage(path.read_bytes()))
        edit = FactEdit(QUESTIONS[0], tiny.other_answer(bert, QUESTIONS[0]))
        load_editor(folder / "editor", torch.device("cpu")).propose(bert, [edit])


@fuzzed(file=st.sampled_from(["state.json", "best.safetensors"]), damage=damages(), state=st.none() | JSON)
def test_checkpoints(part: int, whole: Path, file: str, damage: Any, state: str | None) -> None:
    with only_our_errors() as folder:
        shutil.copytree(whole / "checkpoint", folder / "checkpoint")
        (newest,) = (folder / "checkpoint").iterdir()
        (newest / file).write_bytes(damage((newest / file).read_bytes()))
        if state is not None:
            (newest / "state.json").write_text(state, errors="surrogatepass")
        load_checkpoint(folder / "checkpoint")


# Models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, bert: TaskModel) -> Path:
    """A classifier and a decoder, with everything that factpatch writes into their folders."""
    place = tmp_path_factory.mktemp("models")
    bert.save(place / "classifier")
    (place / "classifier" / HELD_OUT).write_text('{"ids": ["1"]}')
    decoder = tiny.build("gpt2-lm", n_embd=8, n_layer=1, n_head=2)
    assert isinstance(decoder, Causal)
    decoder.set_template("{} =", 4)
    decoder.save(place / "decoder")
    return place


@fuzzed(name=st.sampled_from(["classifier", "decoder"]), number=OURS, other=OURS, new=VALUES, damage=damages())
def test_models(part: int, folders: Path, name: str, number: int, other: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        shutil.copytree(folders / name, folder / "model")
        files = sorted((folder / "model").iterdir())
        path = files[number % len(files)]
        if path.suffix == ".json" and other % 3:
            path.write_text(json.dumps(changed(json.loads(path.read_text()), other, new)))
        else:
            path.write_bytes(damage(path.read_bytes()))
        load_model(folder / "model", "cpu").predict(QUESTIONS[:2])


# Scopes and covariances


def damaged_copy(source: Path, target: Path, number: int, new: Any, damage: Any) -> Path:
    """Copies a file of tensors with one value changed and, with `damage`, some bytes."""
    write_changed(target, load_file(source), metadata_of(source), number, new)
    if damage and target.exists():
        target.write_bytes(damage(target.read_bytes()))
    return target


@fuzzed(number=OURS, new=NEW, damage=st.none() | damages())
def test_scopes(part: int, whole: Path, bert: TaskModel, number: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        path = damaged_copy(whole / "scope", folder / "file", number, new, damage)
        Scope.load(path, bert).index([QUESTIONS[0]]).match(QUESTIONS)


@fuzzed(number=OURS, new=NEW, damage=st.none() | damages())
def test_scopes_with_a_comparer(part: int, whole: Path, bert: TaskModel, number: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        path = damaged_copy(whole / "scope with a comparer", folder / "file", number, new, damage)
        Scope.load(path, bert).index([QUESTIONS[0]]).match(QUESTIONS)


@fuzzed(number=OURS, new=NEW, damage=st.none() | damages())
def test_covariances(part: int, whole: Path, bert: TaskModel, number: int, new: Any, damage: Any) -> None:
    with only_our_errors() as folder:
        found = Covariance.load(damaged_copy(whole / "covariance", folder / "file", number, new, damage))
        merge(bert, [Patch.load(whole / "patch")], covariance=found)


# Ledgers


def use_ledger(path: Path, model: TaskModel) -> None:
    with Ledger(path) as ledger:
        for fact in ledger.facts(None):
            ledger.history(fact.id)
    with Ledger(path, model) as ledger:
        ledger.patch()
        ledger.verify(QUESTIONS)
        for fact in ledger.facts():
            ledger.patch_of(fact)
            ledger.remove(fact.id)
        ledger.patch()


@fuzzed(damage=damages())
def test_damaged_ledgers(part: int, whole: Path, bert: TaskModel, damage: Any) -> None:
    with only_our_errors() as folder:
        (folder / "file").write_bytes(damage((whole / "ledger").read_bytes()))
        use_ledger(folder / "file", bert)


COLUMNS = [
    *(("facts", column) for column in "id x form before target paraphrases note added status".split()),
    *(("meta", column) for column in ("key", "value", "value", "value")),
    *((table, column) for table in ("patches", "token_rows") for column in ("fact", "tensors", "tensors")),
    *(("covariance", column) for column in ("name", "tensors")),
    *(("cache", column) for column in ("name", "facts", "tensors", "tensors")),
    *(("history", column) for column in ("time", "event")),
    ("patches", "method"),
]
CELLS = st.none() | NUMBERS | TEXTS | JSON | st.binary(max_size=9) | TENSORS


@fuzzed(cells=st.lists(st.tuples(st.sampled_from(COLUMNS), OURS, CELLS), min_size=1, max_size=2))
def test_forged_ledgers(part: int, whole: Path, bert: TaskModel, cells: Any) -> None:
    """Single cells of a ledger's tables are replaced, with right checksums where there are any, or removed."""
    with only_our_errors() as folder:
        shutil.copy(whole / "ledger", folder / "file")
        with closing(sqlite3.connect(folder / "file", isolation_level=None)) as db:
            for (table, column), number, new in cells:
                with suppress(
                    sqlite3.Error, SafetensorError, OverflowError, UnicodeEncodeError
                ):  # what the table itself refuses
                    forge(db, table, column, number, new)
        use_ledger(folder / "file", bert)


def forge(db: sqlite3.Connection, table: str, column: str, number: int, new: Any) -> None:
    keys = [row[0] for row in db.execute(f"SELECT {column} FROM {table}")]
    if not keys:
        return
    old = keys[number % len(keys)]
    if new is None:
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", (old,))
        return
    if isinstance(new, torch.Tensor):
        from factpatch.ledger_store import load

        tensors = load(old[32:]) if isinstance(old, bytes) else {}
        new = pack({**tensors, (sorted(tensors) or ["x"])[number % max(1, len(tensors))]: new})
    elif isinstance(new, str) and isinstance(old, str) and old.startswith(("{", "[")) and number % 2:
        with suppress(ValueError, RecursionError):
            new = json.dumps(changed(json.loads(old), number, json.loads(new)))
    db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (new, old))
