"""The beam search against transformers' own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import tiny
import torch
from conftest import QUESTIONS, loud_editor

from factpatch.engine import edited
from factpatch.facts import FactEdit
from factpatch.models import Seq2Seq
from factpatch.models.beam import beam_search, supports
from factpatch.models.decoding import EncoderDecoderSteps

SETTINGS: list[dict[str, Any]] = [
    {},
    {"early_stopping": True},
    {"length_penalty": 2.0},
    {"length_penalty": 0.0, "max_new_tokens": 5},
    {"bad_words_ids": [[tiny.PAD], [7]], "renormalize_logits": True},
    {"bad_words_ids": [[9]]},
    {"forced_bos_token_id": 5, "early_stopping": True},
    {"forced_eos_token_id": None, "max_new_tokens": 3},
    {"num_beams": 2, "early_stopping": True, "max_new_tokens": 12},
]


def warm(name: str, seed: int) -> Seq2Seq:
    """A tiny model that sometimes ends early: random ones hardly ever say </s>."""
    model = tiny.build(name, seed)
    assert isinstance(model, Seq2Seq)
    model.limit_answers(9)
    with torch.no_grad():
        head = model.model.get_output_embeddings()
        assert head is not None
        head.weight[tiny.EOS] += 0.5 * head.weight.mean(0) + 0.1
    return model


@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_it_finds_what_generate_finds(name: str, changes: dict[str, Any]) -> None:
    for seed in range(3):
        model = warm(name, seed)
        generation = copy.deepcopy(model.generation)
        generation.update(**changes)
        assert supports(generation)
        rows = model.rows([*QUESTIONS, "what is a lake ?", "euro", "the largest river in europe and africa ?"])
        beams = generation.num_beams
        found = [
            beam_search(EncoderDecoderSteps(model.model, rows.inputs), generation, edits).sequences.flatten(0, 1)
            for edits in (None, 1, 2)
        ]
        generation.num_return_sequences = beams
        model.model.generation_config = generation  # `generate` takes what is None from here
        expected = model.model.generate(**rows.inputs, generation_config=generation)
        wanted, *said = (model.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (expected, *found))
        assert said == [wanted] * 3


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
def test_rows_leave_with_their_like_under_other_edits(name: str) -> None:
    """Each edit has all the questions; those answered under every edit leave, and no answer changes."""
    model = warm(name, 1)
    questions = [*QUESTIONS, "what is a lake ?", "euro", "the largest river in europe and africa ?"]
    edits = model.resolve([FactEdit(x, tiny.other_answer(model, x)) for x in QUESTIONS[:2]])
    editor = loud_editor(model)
    rows = model.rows(2 * questions)
    with edited(model.layers, editor.update(model, editor.batch(model, edits))):
        assert model.decide(rows, 5, edits=2) == model.decide(rows, 5)


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.SEQ2SEQS)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_a_search_for_fewer_answers_finds_the_same_best(name: str, penalty: float) -> None:
    questions = [*QUESTIONS, "what is a lake ?", "euro", "the largest river in europe and africa ?"]
    saved = 0
    for seed in range(5):
        model = tiny.build(name, seed)
        assert isinstance(model, Seq2Seq)
        tiny.end_early(model)
        model.generation.length_penalty = penalty
        steps = [CountedSteps(model.model, model.rows(questions).inputs) for _ in range(5)]
        found = [beam_search(steps[n], model.generation, 1, count=n + 1) for n in range(5)]
        for n in range(5):
            assert torch.equal(found[n].sequences[:, : n + 1], found[4].sequences[:, : n + 1])
        saved += steps[4].sequences - steps[0].sequences
    assert saved > 0 if penalty <= 0 else saved == 0


class CountedSteps(EncoderDecoderSteps):
    """Counts the sequences that a search continues by one token."""

    sequences = 0

    def next(self, last: torch.Tensor) -> torch.Tensor:
        self.sequences += len(last)
        return super().next(last)


def test_settings_it_does_not_know_are_left_to_generate() -> None:
    model = warm("bart", 0)
    model.generation.no_repeat_ngram_size = 2
    assert not supports(model.generation)
    answer = model.predict(["what is a lake ?"])[0].split()
    assert len(set(itertools.pairwise(answer))) == len(answer[1:])
