"""Prepares the ways to draw control inputs: uniformly, by uncertainty, or among look-alikes of the edited input.

Look-alikes are the first inputs that an edit disturbs. They are the nearest neighbours of an input in the model's own
space, and inputs with the same subject or the same relation, where the data names these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.data.revisions import Revision
from factpatch.models import TaskModel
from factpatch.processes import broadcast_from_first
from factpatch.scope.features import spread_layers, text_features
from factpatch.training.batcher import Batcher
from factpatch.training.sampler import NEAR, Indices, Sampler
from factpatch.training.unedited import OnShare, uncertainties

NEAREST = 16  # nearest neighbours per revision
SPARE = 8  # further ones, in place of neighbours that are the revision's own input or paraphrases
ALIKE = 8  # control inputs drawn per revision with the same subject, and as many with the same relation
TYPICAL_PLANS = 4  # plans from which the groups of a batch's rows are chosen
QUERIES_PER_BATCH = 1024  # number of inputs that are compared with the whole pool at a time


def prepare_controls(
    sampler: Sampler,
    model: TaskModel,
    batcher: Batcher,
    revisions: Sequence[Revision],
    unedited: Tensor | None,
    on_share: OnShare,
) -> None:
    """Computes what the sampler needs for the ways of drawing control inputs that the config names."""
    config = sampler.config
    if not config.controls_per_edit:
        return
    if "unsure" in config.others:
        sampler.weights = broadcast_from_first(uncertainties(model, batcher, sampler.pool, unedited, on_share))
    if "near" in config.others:
        sampler.near = broadcast_from_first(look_alikes(model, revisions, sampler))
    batcher.group_columns([sampler.plan(step) for step in range(TYPICAL_PLANS)])


def look_alikes(model: TaskModel, revisions: Sequence[Revision], sampler: Sampler) -> Indices:
    """Finds the look-alikes of each revision among the control inputs.

    Returns indices in the pool: (revisions, NEAREST + 2·ALIKE). Revisions without a subject or a relation, or for
    which these name no other input, have their nearest neighbours twice.
    """
    pool, everyone = sampler.pool, np.arange(len(revisions))
    nearest = _nearest(model, [r.input for r in revisions], pool)  # (revisions, NEAREST + SPARE)
    own = sampler.is_own_form(everyone, pool[nearest])
    nearest = np.take_along_axis(nearest, own.argsort(1, kind="stable"), 1)[:, :NEAREST]
    rng = np.random.default_rng([sampler.config.seed, NEAR])
    alike = [_alike(names, pool, rng) for names in ([r.subject for r in revisions], [r.relation for r in revisions])]
    table = np.concatenate([nearest, *alike], 1)
    unusable = (table < 0) | sampler.is_own_form(everyone, pool[table])
    instead = nearest[:, np.arange(table.shape[1]) % nearest.shape[1]]
    return np.where(unusable, instead, table)


def _nearest(model: TaskModel, texts: Sequence[str], pool: Indices) -> Indices:
    """Finds the inputs of the pool whose hidden states have the highest cosines with each text's: (texts, neighbours).

    Hidden states are averaged over tokens at a few layers, and standardised over all texts.
    """
    features = text_features(model, texts, spread_layers(model))  # (texts, layers·width)
    features = F.normalize((features - features.mean(0)) / features.std(0).clamp_min(1e-6), dim=1)
    controls = features[torch.from_numpy(pool).to(features.device)]
    count = min(NEAREST + SPARE, len(pool))
    found = [(part @ controls.T).topk(count).indices for part in features.split(QUERIES_PER_BATCH)]
    return torch.cat(found).cpu().numpy()


def _alike(names: Sequence[str | None], pool: Indices, rng: np.random.Generator) -> Indices:
    """Draws inputs of the pool that have each revision's name, with repeats: (revisions, ALIKE); -1 if there are none.

    The names are those of the revisions' subjects or relations.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys([None, *names]))}
    own = np.array([numbers[name] for name in names])
    order = np.argsort(own[pool], kind="stable")  # the pool, sorted by name
    counts = np.bincount(own[pool], minlength=len(numbers))
    starts = np.cumsum(counts) - counts
    counts[numbers[None]] = 0  # an unknown name is not the same as another unknown one
    drawn = starts[own][:, None] + (rng.random((len(names), ALIKE)) * counts[own][:, None]).astype(np.int64)
    return np.where(counts[own][:, None] > 0, order[np.minimum(drawn, len(order) - 1)], -1)
