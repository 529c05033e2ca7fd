"""Look-alikes of an edited input as control inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from samples import revisions
from torch.nn import functional as F

from factpatch.data.revisions import Revision
from factpatch.facts import normalize
from factpatch.models import TaskModel
from factpatch.scope.features import spread_layers, text_features
from factpatch.training import TrainConfig
from factpatch.training.controls import ALIKE, NEAREST, look_alikes
from factpatch.training.sampler import Sampler

NEAR = TrainConfig(edits=8, rows=16, others=("near",))


@pytest.fixture(scope="module", params=["bert", "bart", "gpt2-lm"])
def model(request: pytest.FixtureRequest) -> TaskModel:
    return tiny.build(request.param)


@pytest.fixture(scope="module")
def known(model: TaskModel) -> list[Revision]:
    return revisions(model, 60)


def cosines(model: TaskModel, known: list[Revision]) -> torch.Tensor:
    features = text_features(model, [r.input for r in known], spread_layers(model))
    unit = F.normalize((features - features.mean(0)) / features.std(0), dim=1)
    return unit @ unit.T


def test_nearest_neighbours(model: TaskModel, known: list[Revision]) -> None:
    """They are the pool's inputs with the highest cosines, without the input itself."""
    sampler = Sampler(known, replace(NEAR, control_pool=40))
    table = look_alikes(model, known, sampler)
    assert table.shape == (60, NEAREST + 2 * ALIKE)
    close = cosines(model, known)[:, torch.from_numpy(sampler.pool)]  # (revisions, pool)
    for i, row in enumerate(table):
        own = (sampler.pool == i).nonzero()[0]
        assert not np.isin(own, row).any()
        rest = np.setdiff1d(np.arange(40), [*own, *row])
        assert len(set(row)) == NEAREST, "neither subject nor relation is known"
        assert close[i, row[:NEAREST]].min() >= close[i, rest].max() - 1e-5


def test_the_same_subject_and_relation(model: TaskModel, known: list[Revision]) -> None:
    about = [
        replace(r, subject=f"subject {i % 20}" if i < 40 else None, relation=f"relation {i % 3}")
        for i, r in enumerate(known)
    ]
    twin = replace(about[0], id="twin", input=f"{about[0].input.upper()} ?")  # the same question, written otherwise
    about.append(twin)
    sampler = Sampler(about, NEAR)
    table = sampler.pool[look_alikes(model, about, sampler)]
    for i, row in enumerate(table):
        nearest, subject, relation = np.split(row, [NEAREST, NEAREST + ALIKE])
        assert all(normalize(about[n].input) != normalize(about[i].input) for n in row)
        assert all(about[n].subject == about[i].subject or n in nearest for n in subject)
        assert all(about[n].relation == about[i].relation or n in nearest for n in relation)
        assert len(set(subject)) > 1
    assert (
        sum(about[n].subject == about[i].subject for i in range(40) for n in table[i, NEAREST : NEAREST + ALIKE]) > 40
    )


def test_mixtures(model: TaskModel, known: list[Revision]) -> None:
    """Each way of drawing gets an equal share of the control inputs."""
    config = replace(NEAR, rows=17, others=("uniform", "near", "unsure"))  # 15 control inputs
    sampler = Sampler(known, config)
    weights = np.zeros(len(sampler.pool))
    weights[:2] = 1
    sampler.weights = weights
    sampler.near = look_alikes(model, known, sampler)
    plan = sampler.plan(0)
    uniform, near, unsure = np.split(plan.controls, 3, axis=1)
    assert len(np.unique(uniform)) > 15
    for number, controls in zip(plan.edited, near, strict=True):
        assert np.isin(controls, sampler.pool[sampler.near[number]]).all()
    assert np.isin(unsure, sampler.pool[:3]).all(), "the third is drawn in place of an edited input"


def test_look_alikes_of_merged_edits(model: TaskModel, known: list[Revision]) -> None:
    """No edit of the step is a control input of another, although they are look-alikes."""
    config = TrainConfig(together=8, rows=16, others=("near",))
    sampler = Sampler(known, config)
    sampler.near = look_alikes(model, known, sampler)
    plan = sampler.plan(0)
    assert len(plan.edited) > 4
    assert not np.isin(plan.controls, plan.edited).any()
