"""The demonstration, with a handful of steps: what it shows is measured, not promised."""

from __future__ import annotations

import random

import torch

from factpatch import demo


def test_the_demo_measures_what_it_shows() -> None:
    torch.manual_seed(0)
    chance = random.Random(0)
    model = demo._fit(chance, lambda message, share: None, steps=30)
    editor = demo._train_editor(model, chance, lambda message, share: None, steps=2)
    result = demo.run(demo.Demo(model, editor), seed=0)
    assert result["changes"][0]["question"] == "What is the capital of Burundi?"
    assert result["edits"] == len(result["changes"]) == 6
    for key in ("success", "retain", "equivalence"):
        assert 0 <= result[key] <= 1
    assert not model.patches


def test_facts_are_of_one_form() -> None:
    assert len(demo.CAPITALS) == 62
    assert all(demo.CAPITALS[country] != answer for country, answer in demo.CHANGES.items())
    assert set(demo.CHANGES.values()) <= set(demo.NEW_NAMES)
