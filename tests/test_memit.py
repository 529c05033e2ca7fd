"""MEMIT: where it writes, its formula for one fact and for many, and which models it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, assert_untouched, weights_of
from samples import revisions, write_revisions

from factpatch.editors import create_method
from factpatch.editors.memit import Memit
from factpatch.editors.subject_tokens import last_subject_token, locate
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import Causal, TaskModel
from factpatch.patch import Patch

SUBJECTS = ["burundi", "france", "rundi and swahili"]
METHOD = Memit(last=1, blocks=2, ridge=0.05, contexts=2, clamp=4.0)


def build(name: str) -> Causal:
    """A model of three blocks: after the last one, the state of one token no longer reaches the tokens after it."""
    depth: dict[str, Any] = {"n_layer" if name == "gpt2-lm" else "num_hidden_layers": 3}
    if name == "gemma3":
        depth["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny.build(name, **depth)
    assert isinstance(model, Causal)
    model.limit_answers(4)
    return model


@pytest.fixture(params=tiny.DECODERS)
def decoder(request: pytest.FixtureRequest) -> Causal:
    return build(request.param)


def edits_of(model: TaskModel, count: int = 3) -> list[FactEdit]:
    pairs = list(zip(QUESTIONS, SUBJECTS, strict=True))[:count]
    return model.resolve([FactEdit(x, tiny.other_answer(model, x), subject=subject) for x, subject in pairs])


def read(model: TaskModel, texts: Sequence[str], edit: FactEdit, weight: str, block: str) -> tuple[Any, Any]:
    """The weight's mean input and the first text's output of a block at the subject, each text run without padding."""
    keys, states = [], []
    for text in texts:
        words = text.split()
        after = words[::-1].index((edit.subject or "").split()[-1])  # words after the subject
        place = len(words) - 1 - after + len(model.encode([""])[0]["input_ids"])
        handles = [
            model.layers[weight].register_forward_pre_hook(
                lambda _, args, p=place: keys.append(args[0].flatten(0, -2)[p])  # OPT flattens rows and tokens
            ),
            model.model.get_submodule(block).register_forward_hook(
                lambda _, args, out, p=place: states.append((out[0] if isinstance(out, tuple) else out)[0, p])
            ),
        ]
        with torch.no_grad():
            model.losses(model.rows([text], [edit.a]))
        for handle in handles:
            handle.remove()
    return torch.stack(keys).mean(0), states[0]


def test_the_last_token_of_the_subject(decoder: Causal) -> None:
    (ids,) = (one["input_ids"] for one in decoder.encode(["who leads france and burundi in europe ?"]))
    words = [decoder.tokenizer.decode([token]) for token in ids]
    assert words[last_subject_token(decoder, ids, "france")] == "france"
    assert words[last_subject_token(decoder, ids, "france and burundi")] == "burundi"
    for unknown in (None, "chad"):
        assert last_subject_token(decoder, ids, unknown) == len(ids) - 1
    twice = decoder.encode(["france ? who leads france ?"])[0]["input_ids"]
    assert last_subject_token(decoder, twice, "france") == len(twice) - 2, "a context may name the subject, too"


def test_single_edits_are_the_formula(decoder: Causal) -> None:
    """Each weight's change is r kᵀ (λ C + k kᵀ)⁻¹, on the model with the changes before it, as dense matrices."""
    decoder.cast(torch.float64)
    edits = edits_of(decoder)
    method = METHOD.calibrated(decoder, revisions(decoder, 12))
    before = weights_of(decoder)
    patches = method.propose(decoder, edits)
    assert_untouched(decoder, before)
    wanted = method._optimised(decoder, locate(decoder, edits, method._prefixes))
    weights = method._weights(decoder)
    *_, block = weights
    assert len(method._prefixes) == 2
    for edit, patch, z in zip(edits, patches, wanted, strict=True):
        done: dict[str, Any] = {}
        for left, name in zip((2, 1), weights.values(), strict=True):
            with replace(patch, deltas=dict(done)).applied(decoder):
                k, h = read(decoder, [prefix + edit.x for prefix in ("", *method._prefixes)], edit, name, block)
            assert method._covariance is not None
            C = method._covariance.of(name, decoder.device)
            inverse = torch.linalg.inv(method.ridge * C + torch.outer(k, k))
            expected = torch.outer((z - h) / left, k) @ inverse
            torch.testing.assert_close(patch.deltas[name].dense().double(), expected, rtol=1e-3, atol=1e-4)
            done[name] = patch.deltas[name]
        assert patch.deltas.keys() == done.keys()
        assert patch.rank == 1


def test_many_edits_are_solved_together() -> None:
    model = build("llama")
    model.cast(torch.float64)
    edits = edits_of(model)
    method = replace(METHOD, blocks=1).calibrated(model, revisions(model, 12))
    before = weights_of(model)
    patch = method.propose_together(model, edits)
    assert_untouched(model, before)
    ((block, name),) = method._weights(model).items()
    z = method._optimised(model, locate(model, edits, method._prefixes))
    pairs = [read(model, [prefix + edit.x for prefix in ("", *method._prefixes)], edit, name, block) for edit in edits]
    K, R = torch.stack([k for k, _ in pairs]).T, (z - torch.stack([h for _, h in pairs])).T  # columns are edits
    assert method._covariance is not None
    C = method._covariance.of(name, model.device)
    expected = R @ K.T @ torch.linalg.inv(method.ridge * C + K @ K.T)
    torch.testing.assert_close(patch.deltas[name].dense().double(), expected, rtol=1e-3, atol=1e-4)
    assert patch.edits == tuple(edits)


def test_edits_begin_to_say_the_target(decoder: Causal) -> None:
    """z at the last token of the prompt, as the subject is not known, decides which word comes next.

    In random models it hardly reaches the word after that.
    """
    edits = [replace(edit, subject=None) for edit in edits_of(decoder, 2)]
    method = replace(METHOD, ridge=1e-4, contexts=0, clamp=20.0, steps=60).calibrated(decoder, revisions(decoder, 12))
    rows = decoder.rows([edit.x for edit in edits], [edit.a for edit in edits])
    patches = method.propose(decoder, edits)
    with torch.no_grad():
        start = decoder.losses(rows)
        for i, patch in enumerate(patches):
            with patch.applied(decoder):
                assert decoder.losses(rows)[i] < start[i]
    if decoder.model.config.model_type == "gemma3_text":
        return  # it normalises what the down-projection adds, so that z is not reached
    answers = decoder.predict_patched(patches, [edit.x for edit in edits])
    assert [answer.split()[0] for answer in answers] == [edit.a.split()[0] for edit in edits]


def test_z_stays_within_its_norm(decoder: Causal) -> None:
    located = locate(decoder, edits_of(decoder))
    block = decoder.model.get_submodule(list(METHOD._weights(decoder))[-1])
    read: list[torch.Tensor] = []
    handle = block.register_forward_hook(
        lambda _, args, out: read.append(located.at_tokens(out[0] if isinstance(out, tuple) else out)[:, 0])
    )
    with torch.no_grad():
        decoder.losses(located.rows)
    handle.remove()
    z = replace(METHOD, clamp=0.1)._optimised(decoder, located)
    share = (z - read[0]).norm(dim=-1) / read[0].norm(dim=-1)
    assert (share < 0.1001).all()
    assert (share > 0.01).all()


def test_patches_do_not_depend_on_the_batch() -> None:
    model = build("llama")
    model.cast(torch.float64)
    edits = edits_of(model)
    method = METHOD.calibrated(model, revisions(model, 12))
    alone: list[Patch] = [patch for edit in edits for patch in method.propose(model, [edit])]
    for one, other in zip(method.propose(model, edits), alone, strict=True):
        for name, delta in one.deltas.items():
            torch.testing.assert_close(delta.dense(), other.deltas[name].dense(), rtol=1e-3, atol=1e-4)


def test_blocks_are_those_at_a_third_of_the_depth() -> None:
    model = tiny.build("llama", num_hidden_layers=10)
    assert [name.split(".")[2] for name in Memit(blocks=3)._weights(model)] == ["1", "2", "3"]
    assert all(name.endswith("down_proj.weight") for name in Memit()._weights(model).values())
    with pytest.raises(InputError, match="blocks 0 to 9, found last=10"):
        Memit(last=10)._weights(model)


def test_other_kinds_of_models_are_refused(
    checker: Path, claims: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    common = ["--model", checker, "--data", claims, "--edits", 3, "--retain", 5, "--device", "cpu"]
    refused = run("evaluate", *common, "--method", "memit", "--output", tmp_path / "no")
    assert refused.code == 1
    last = refused.err.strip().splitlines()[-1]
    assert last == "error: the method memit edits decoders only, and this model is a classifier; choose another"
    bart = tiny.build("bart")
    with pytest.raises(InputError, match="this model is a seq2seq"):
        create_method("memit").propose(bart, [FactEdit(QUESTIONS[0], "gitega")])
    llama = tiny.build("llama")
    with pytest.raises(InputError, match="calibrate it on revisions"):
        create_method("memit").propose(llama, [FactEdit(QUESTIONS[0], tiny.other_answer(llama, QUESTIONS[0]))])


def test_the_command_line(tmp_path: Path, run: Callable[..., Any]) -> None:
    model = tiny.build("llama")
    model.save(tmp_path / "model")
    data = write_revisions(tmp_path / "data.jsonl", model, 40)
    common = ["--model", tmp_path / "model", "--data", data, "--edits", 4, "--retain", 6, "--device", "cpu", "--json"]
    mine = ["--method", "memit", "--set", "ridge=1e-2", "--set", "steps=3", "--together", "2", "--merge", "own"]
    result = run("evaluate", *common, *mine, "--output", tmp_path / "result").json
    assert (result["edits"], result["curve"][0]["facts"]) == (4, 2)
    assert 0 <= result["forced_success"] <= 1
