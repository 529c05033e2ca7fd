"""A revision set as tensors on the model's device, tokenised once. Steps are sampled as numbers and picked from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.data.revisions import Revision, teachable
from factpatch.device import to_device
from factpatch.editors import Condition, EditBatch, TrainableEditor
from factpatch.errors import InputError
from factpatch.facts import FactEdit, normalize
from factpatch.models import Rows, TaskModel
from factpatch.models.base import NO_TARGET, Encoded, padded
from factpatch.training.config import TrainConfig

Numbers = NDArray[np.int64]

# Where steps are recorded, once for each set of shapes, widths are rounded up to multiples of these.
TEXT_STEP, TARGET_STEP = 16, 4


@dataclass(frozen=True)
class Plan:
    """What one step looks at, as numbers into the table."""

    revisions: Numbers  # (edits,)
    alternatives: Numbers  # (edits,)  which of its alternatives each is edited to
    paraphrases: Numbers  # (edits, paraphrases)  texts; the input's own where it has none
    others: Numbers  # (edits, others)  revisions whose predictions shall stay

    def part(self, first: int, parts: int) -> Plan:
        """Every `parts`-th edit from the first."""
        mine = slice(first, None, parts)
        return Plan(self.revisions[mine], self.alternatives[mine], self.paraphrases[mine], self.others[mine])

    def __len__(self) -> int:
        return len(self.revisions)


@dataclass(frozen=True)
class Targets:
    """Some of a batch's targets, place by place: each class, or each token of an answer, is one."""

    labels: Tensor  # (places,)  the class or token wanted
    weights: Tensor  # (places,)  the place's share in a mean over tokens, rows and edits
    numbers: Tensor  # (places,)  where the place stands among the kept targets


@dataclass(frozen=True)
class StepBatch:
    """One step, or a part of one. The places of `rows` are those of `edit`, then those of `keep`."""

    fact: EditBatch  # what the editor reads
    rows: Rows  # (edits·rows, tokens), edit-major: inputs and paraphrases, then others
    edit: Targets  # of the edit loss
    keep: Targets  # of the constraint


@dataclass(frozen=True)
class _Columns:
    """Rows of each edit, as numbers: (edits, rows) each."""

    texts: Numbers
    targets: Numbers
    weights: NDArray[np.float64]  # the row's share in a mean over the edit's rows
    numbers: Numbers  # of the row's first place among the kept targets


class RevisionTable:
    """Revisions to edit, and to keep."""

    def __init__(self, model: TaskModel, editor: TrainableEditor, revisions: Sequence[Revision], config: TrainConfig):
        self.config = config
        self.device = model.device
        self.few_shapes = model.device.type == "cuda" and config.graphs and config.split == 1
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step lies in one epoch or at the border of two
        wanted = [revision.alternatives for revision in teachable(model, revisions)]
        self.editable = np.array([i for i, texts in enumerate(wanted) if texts], dtype=np.int64)
        if len(self.editable) == 0:
            raise InputError("expected revisions with alternatives to train on, found none; make them with revise")
        if len({normalize(r.input) for r in revisions}) < 2:
            raise InputError("expected at least two different inputs to train on, found one")

        numbered, targets, facts = _Numbering(), _Numbering(), _Numbering()
        self.inputs = np.array([numbered[r.input] for r in revisions])
        self.keys = np.unique([normalize(r.input) for r in revisions], return_inverse=True)[1]
        self.alternatives = _Ragged([targets[text] for text in wanted_of] for wanted_of in wanted)
        self.paraphrases = _Ragged([numbered[text] for text in self._paraphrases(r)] for r in revisions)
        self.kept = _Ragged(
            [targets[text] for text in (r.prediction, *wanted_of)[: config.candidates]]
            for r, wanted_of in zip(revisions, wanted, strict=True)
        )
        self.conditions = _Ragged(
            [facts[editor.condition_text(FactEdit(r.input, text, r.prediction))] for text in wanted_of]
            for r, wanted_of in zip(revisions, wanted, strict=True)
        )
        # No more others than the whole run can look at: each one's unedited outputs are computed once.
        most = config.steps * config.edits * config.others_a_step if config.minutes is None else len(revisions)
        self.pool = np.random.default_rng([config.seed, 2]).permutation(len(revisions))[: max(2, most)]
        self.shares: NDArray[np.float64] | None = (
            None  # of each in the pool and all before it, where not drawn uniformly
        )

        limit = min(config.max_tokens, model.max_input_tokens)
        step = TEXT_STEP if self.few_shapes else 1
        self.texts = _Texts(model.encode(numbered.known, limit), model.tokenizer.pad_token_id or 0, self.device, step)
        conditions = [{"input_ids": one["input_ids"]} for one in model.encode(facts.known)]
        self.facts = _Texts(conditions, 0, self.device, step)
        encoded = model.encode_targets(targets.known)
        self.classes = not isinstance(encoded[0], list)
        tokens = [[target] if self.classes else target for target in encoded]
        self.target_lengths = np.array([len(target) for target in tokens])
        self.targets = padded(tokens, NO_TARGET, self.device)
        lengths = self.target_lengths[self.kept.flat]
        self.first_places = np.cumsum(lengths) - lengths  # of each kept target
        self.target_positions = int(lengths.sum())

    def _paraphrases(self, revision: Revision) -> tuple[str, ...]:
        return {
            "generated": revision.rephrases,
            "human": revision.human_rephrases,
            "all": revision.rephrases + revision.human_rephrases,
            "none": (),
        }[self.config.paraphrases]

    # Sampling

    def prefer(self, weights: NDArray[np.float64]) -> None:
        """Others are drawn in proportion to these from here on, one for each of the pool."""
        self.shares = np.cumsum(weights) / np.sum(weights)

    def plan(self, step: int) -> Plan:
        """The same for the same seed and step, so that a run can go on at any step."""
        config = self.config
        chance = np.random.default_rng([config.seed, 0, step])
        revisions = self._edited_at(step)
        drawn = chance.random((config.edits, config.paraphrases_a_step))
        paraphrases = self.paraphrases.pick(revisions[:, None], drawn, empty=self.inputs[revisions][:, None])
        drawn = chance.random(config.edits)
        alternatives = (drawn * self.alternatives.counts[revisions]).astype(np.int64)
        places = self._places_of_others(chance)
        for _ in self.pool:  # an input equal to the edited one is not another
            clash = self.keys[self.pool[places]] == self.keys[revisions][:, None]
            if not clash.any():
                break
            places = np.where(clash, (places + 1) % len(self.pool), places)
        return Plan(revisions, alternatives, paraphrases, self.pool[places])

    def _places_of_others(self, chance: np.random.Generator) -> Numbers:
        """In the pool: (edits, others)"""
        shape = (self.config.edits, self.config.others_a_step)
        if self.shares is None:
            return chance.integers(0, len(self.pool), shape)
        places = np.searchsorted(self.shares, chance.random(shape), side="right")
        return np.minimum(places, len(self.pool) - 1)  # the last share may be rounded to less than 1

    def _edited_at(self, step: int) -> Numbers:
        """Each revision is edited once an epoch, in the epoch's own order."""
        places = step * self.config.edits + np.arange(self.config.edits)
        epochs, within = np.divmod(places, len(self.editable))
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._order(int(epoch))[within[here]]
        return found

    def _shuffled(self, epoch: int) -> Numbers:
        return np.random.default_rng([self.config.seed, 1, epoch]).permutation(self.editable)

    # Batches

    def batch(self, plan: Plan, total: int) -> StepBatch:
        """The plan's rows. Weights are shares of a mean over `total` edits, of which the plan may be a part."""
        inputs = self.inputs[plan.revisions]
        wanted = self.alternatives.at(plan.revisions, plan.alternatives)  # (edits,)
        edit_texts = np.concatenate([inputs[:, None], plan.paraphrases], 1)  # (edits, input and paraphrases)
        like_edit_texts = np.ones_like(edit_texts)
        edit = _Columns(
            edit_texts, wanted[:, None] * like_edit_texts, like_edit_texts / edit_texts.shape[1], 0 * like_edit_texts
        )
        keep = self._kept_columns(plan.others)
        texts = np.concatenate([edit.texts, keep.texts], 1)  # (edits, rows)
        labels = self._labels(np.concatenate([edit.targets, keep.targets], 1).ravel())
        rows = np.arange(texts.size).reshape(texts.shape)
        edit_targets, edit_places = self._filled(*self._targets(edit, rows[:, : edit_texts.shape[1]], labels, total))
        keep_targets, keep_places = self._filled(*self._targets(keep, rows[:, edit_texts.shape[1] :], labels, total))
        facts = self.conditions.at(plan.revisions, plan.alternatives)
        condition = Condition(self.facts.pick(facts)["input_ids"], to_device(self.device, self.facts.lengths[facts]))
        return StepBatch(
            fact=EditBatch(Rows(self.texts.pick(inputs), self._labels(wanted)), condition),
            rows=Rows(self.texts.pick(texts.ravel()), labels, torch.cat([edit_places, keep_places])),
            edit=edit_targets,
            keep=keep_targets,
        )

    def kept_batch(self, revisions: Numbers) -> tuple[Rows, Targets]:
        """Each revision's input with each of its kept targets, one edit a revision."""
        columns = self._kept_columns(revisions[:, None])
        labels = self._labels(columns.targets.ravel())
        targets, places = self._targets(columns, np.arange(columns.texts.size).reshape(columns.texts.shape), labels, 1)
        return Rows(self.texts.pick(columns.texts.ravel()), labels, places), targets

    def _kept_columns(self, others: Numbers) -> _Columns:
        """A row for each candidate of each other input; where it has fewer, its prediction again, with no weight."""
        candidates = np.arange(self.config.candidates)
        there = candidates < self.kept.counts[others][..., None]  # (edits, others, candidates)
        kept = self.kept.starts[others][..., None] + np.where(there, candidates, 0)
        shape = (len(others), -1)
        return _Columns(
            texts=np.repeat(self.inputs[others], self.config.candidates, axis=1),
            targets=self.kept.flat[kept].reshape(shape),
            weights=(there / max(1, others.shape[1])).reshape(shape),
            numbers=self.first_places[kept].reshape(shape),
        )

    def _targets(self, columns: _Columns, rows: Numbers, labels: Tensor, total: int) -> tuple[Targets, Tensor]:
        """The places of some rows, and where in the batch they are."""
        width = 1 if self.classes else labels.shape[1]
        lengths = self.target_lengths[columns.targets.ravel()]
        row, token = np.nonzero(np.arange(width) < lengths[:, None])
        places = to_device(self.device, rows.ravel()[row] * width + token)
        weights = columns.weights.ravel()[row] / lengths[row] / total
        return (
            Targets(
                labels=labels.flatten().index_select(0, places),
                weights=to_device(self.device, weights.astype(np.float32)),
                numbers=to_device(self.device, columns.numbers.ravel()[row] + token),
            ),
            places,
        )

    def _filled(self, targets: Targets, places: Tensor) -> tuple[Targets, Tensor]:
        """Where few shapes are wanted, with places added that count nothing."""
        missing = -len(places) % max(1, 2 ** len(places).bit_length() // 8)
        if not self.few_shapes or self.classes or not missing:
            return targets, places
        filled = Targets(
            labels=F.pad(targets.labels, (0, missing), value=NO_TARGET),
            weights=F.pad(targets.weights, (0, missing)),
            numbers=F.pad(targets.numbers, (0, missing)),
        )
        return filled, F.pad(places, (0, missing))

    def _labels(self, targets: Numbers) -> Tensor:
        """(rows,) classes, or (rows, tokens)"""
        width = int(self.target_lengths[targets].max())
        width += -width % TARGET_STEP if self.few_shapes else 0
        picked = self.targets[to_device(self.device, targets), :width]
        return picked[:, 0] if self.classes else picked


class _Texts:
    """Encoded texts, padded, on the device."""

    def __init__(self, encoded: Sequence[Encoded], pad: int, device: torch.device, step: int = 1):
        """Picked ones are as wide as the longest of them, rounded up to a multiple of `step`."""
        self.step = step
        self.lengths = np.array([len(one["input_ids"]) for one in encoded])
        fills = {"input_ids": pad}
        self.columns = {key: padded([one[key] for one in encoded], fills.get(key, 0), device) for key in encoded[0]}

    def pick(self, numbers: Numbers) -> dict[str, Tensor]:
        width = int(self.lengths[numbers].max())
        width += -width % self.step
        index = to_device(self.columns["input_ids"].device, numbers)
        return {key: column[index, :width] for key, column in self.columns.items()}


class _Numbering:
    """Texts numbered in the order in which they turn up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def known(self) -> list[str]:
        return list(self.numbers)


class _Ragged:
    """Lists of numbers, end to end."""

    def __init__(self, lists: Iterable[list[int]]):
        kept = list(lists)
        self.counts = np.array([len(one) for one in kept], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.flat = np.array([number for one in kept for number in one] or [0], dtype=np.int64)

    def at(self, lists: Numbers, places: Numbers) -> Numbers:
        return self.flat[self.starts[lists] + places]

    def pick(self, lists: Numbers, drawn: NDArray[np.float64], empty: Numbers) -> Numbers:
        """A random entry of each list, by numbers drawn from [0, 1); `empty` where there is none."""
        counts = self.counts[lists]
        places = self.starts[lists] + (drawn * counts).astype(np.int64)
        return np.where(counts > 0, self.flat[np.minimum(places, len(self.flat) - 1)], empty)
