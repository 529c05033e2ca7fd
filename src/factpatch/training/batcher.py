"""Tokenises revisions once, and builds the tensors of each training step from them.

One step makes E edits. Each edit has R rows that run under its own patch: its input, its paraphrases and control
inputs. Only target positions count: the class of a row, or the tokens of its answer (`·` is padding).

    edit 0   x: "Who leads Chad?"             ->  a b ·    edit_targets     the new answer; cross-entropy
             paraphrase: "Chad's leader?"     ->  a b ·    edit_targets
             control: "Capital of Chad?"      ->  p · ·    control_targets  the model's own prediction; KL to
             control: "Author of Emma?"       ->  q r s    control_targets  the unedited model's outputs
    edit 1   x: "Largest lake in Mali?"       ->  c · ·    edit_targets
             ...

    edit_batch        (E rows)    what the editor reads: each x with its new answer, and the edit as one text
    row_groups        (E·R rows)  the texts above, with the answers as labels, in groups of similar length
    edit_targets      (positions) a b a b c ...   each with its label and its weight
    control_targets   (positions) p q r s ...     also with its index in the table of unedited outputs

Each group of rows is one forward pass, so that short texts need not be padded to the length of the longest one. The
first group has each edit's input, paraphrases and longest control inputs, the others have the shorter control inputs
(columns.py). The weights are shares of a mean over tokens, then rows, then edits, so that a sum over positions is that
mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.data.revisions import Revision
from factpatch.data.targets import Texts
from factpatch.device import to_device
from factpatch.editors import Condition, EditBatch, TrainableEditor
from factpatch.facts import FactEdit
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import NO_TARGET, padded
from factpatch.training.columns import TOKENS_PER_PASS, group_columns
from factpatch.training.config import TrainConfig
from factpatch.training.sampler import Indices, Plan, training_paraphrases
from factpatch.training.tables import Ragged, Sizes, TextNumbers, TextTable

# Sizes are rounded up to multiples of these where steps are recorded as CUDA graphs.
TEXT_STEP, TARGET_STEP = 8, 4


@dataclass(frozen=True)
class Targets:
    """Target positions of some rows of a batch: each class, or each token of an answer, is one."""

    labels: Tensor  # (positions,)  the class or token wanted
    weights: Tensor  # (positions,)  shares of a mean over tokens, rows and edits


@dataclass(frozen=True)
class ControlTargets(Targets):
    unedited_index: Tensor  # (positions,)  index in the table of the unedited model's outputs


@dataclass(frozen=True)
class StepBatch:
    """The tensors of one step, or of a part of one."""

    edit_batch: EditBatch  # what the editor reads
    # (edits·columns, tokens) each, edit by edit. The target positions of all groups, one group after the other, are
    # those of edit_targets and then those of control_targets.
    row_groups: tuple[Rows, ...]
    edit_targets: Targets
    control_targets: ControlTargets


@dataclass(frozen=True)
class _RowChoice:
    """The rows of each edit, given by indices of texts and targets: (edits, rows) each."""

    texts: Indices
    targets: Indices
    weights: NDArray[np.float64]  # shares of a mean over the edit's rows
    unedited_start: Indices  # index of the row's first position in the table of unedited outputs; 0 if it has none

    def columns(self, chosen: Indices) -> _RowChoice:
        return _RowChoice(**{name: values[:, chosen] for name, values in vars(self).items()})


class Batcher:
    """All texts and targets of a revision set, tokenised once and kept on the model's device."""

    def __init__(
        self,
        model: TaskModel,
        editor: TrainableEditor,
        revisions: Sequence[Revision],
        config: TrainConfig,
        edit_to: Sequence[tuple[Texts, ...]] | None = None,
    ):
        """`revisions` must have only valid alternatives. `edit_to` holds each revision's targets by kind.

        Without `edit_to`, the targets are the alternatives.
        """
        self.config = config
        self.device = model.device
        few = model.device.type == "cuda" and config.graphs and config.split == 1
        self.edit_sizes, *self.group_sizes = (Sizes(few) for _ in range(1 + config.length_groups))
        texts, targets, conditions = TextNumbers(), TextNumbers(), TextNumbers()
        self.inputs = np.array([texts[r.input] for r in revisions])
        self.paraphrases = Ragged([texts[text] for text in training_paraphrases(r, config)] for r in revisions)
        wanted = [sum(own, ()) for own in edit_to] if edit_to else [r.alternatives for r in revisions]
        self.wanted = Ragged([targets[text] for text in own] for own in wanted)
        self.conditions = Ragged(
            [conditions[editor.condition_text(FactEdit(r.input, text, r.prediction))] for text in own]
            for r, own in zip(revisions, wanted, strict=True)
        )
        # Answers of a revision that must stay if it is a control input: its prediction, or all candidates of its beam.
        self.kept = Ragged(
            [targets[text] for text in (r.prediction, *r.alternatives)[: config.candidates]] for r in revisions
        )
        limit = min(config.max_tokens, model.max_input_tokens)
        self.texts = TextTable(model.encode(texts.known, limit), model.tokenizer.pad_token_id or 0, self.device)
        encoded = [{"input_ids": ids} for ids in model.tokenizer(conditions.known, verbose=False)["input_ids"]]
        self.condition_texts = TextTable(encoded, 0, self.device)
        self._encode_targets(model, targets.known)
        lengths = self.target_lengths[self.kept.flat]
        self.unedited_starts = np.cumsum(lengths) - lengths  # of each kept target
        self.unedited_size = int(lengths.sum())  # positions in the table of unedited outputs
        self.column_groups = [np.arange(config.controls_per_edit * config.candidates)]

    def _encode_targets(self, model: TaskModel, targets: list[str]) -> None:
        encoded = model.encode_targets(targets)
        self.classes = not isinstance(encoded[0], list)
        tokens = [[target] if self.classes else target for target in encoded]
        self.target_lengths = np.array([len(target) for target in tokens])
        self.targets = padded(tokens, NO_TARGET, self.device)  # (targets, tokens)

    def control_lengths(self, controls: Indices) -> Indices:
        """Returns the number of tokens, of text and prediction together, of each control input."""
        rows = self._control_rows(controls[:, None])
        return (self.texts.lengths[rows.texts] + self.target_lengths[rows.targets])[:, 0]

    def group_columns(self, plans: Sequence[Plan]) -> None:
        """Chooses the groups of rows of all later batches, given a few typical plans."""
        edits = [self._widths(self._edit_rows(plan, self.wanted.at(plan.edited, plan.targets))) for plan in plans]
        controls = [self._widths(self._control_rows(plan.controls)) for plan in plans]
        cost = TOKENS_PER_PASS.get(self.device.type, TOKENS_PER_PASS["cpu"]) / len(plans[0])
        groups = self.config.length_groups
        self.column_groups = group_columns(np.max(edits, 0), np.max(controls, 0), groups, cost)

    def _widths(self, choice: _RowChoice) -> Indices:
        """Returns the lengths of the longest text and the longest target of each column: (2, columns)."""
        return np.stack([self.texts.lengths[choice.texts].max(0), self.target_lengths[choice.targets].max(0)])

    def batch(self, plan: Plan, total: int) -> StepBatch:
        """Builds the batch of a plan, which may be a part of a step.

        Weights are shares of a mean over the `total` edits of the step.
        """
        wanted = self.wanted.at(plan.edited, plan.targets)  # (edits,)
        controls = self._control_rows(plan.controls)
        longest, *others = (controls.columns(group) for group in self.column_groups)
        sizes, *later_sizes = self.group_sizes
        rows, (edit_targets, first) = self._rows([self._edit_rows(plan, wanted), longest], total, sizes)
        later = [self._rows([choice], total, own) for choice, own in zip(others, later_sizes, strict=False)]
        control_targets = [first, *(targets for _, (targets,) in later)]
        return StepBatch(
            edit_batch=self._edit_batch(plan, wanted),
            row_groups=(rows, *(rows for rows, _ in later)),
            edit_targets=Targets(edit_targets.labels, edit_targets.weights),
            control_targets=ControlTargets(
                **{f.name: torch.cat([getattr(one, f.name) for one in control_targets]) for f in fields(ControlTargets)}
            ),
        )

    def control_batch(self, controls: Indices) -> tuple[Rows, ControlTargets]:
        """Builds the rows of some control inputs, one after the other, to be run on the unedited model."""
        rows, (targets,) = self._rows([self._control_rows(controls[:, None])], total=1, sizes=Sizes(few=False))
        return rows, targets

    def _rows(self, choices: Sequence[_RowChoice], total: int, sizes: Sizes) -> tuple[Rows, list[ControlTargets]]:
        """Builds one group of rows, with the columns of all choices, and the targets of each choice."""
        texts = np.concatenate([choice.texts for choice in choices], 1)  # (edits, columns)
        labels = self._labels(np.concatenate([choice.targets for choice in choices], 1).ravel(), sizes)
        numbers = np.arange(texts.size).reshape(texts.shape)  # of each row in the group
        ends = np.cumsum([choice.texts.shape[1] for choice in choices])[:-1]
        found = [
            self._filled(*self._targets(choice, own, labels, total), sizes, name=f"targets {i}")
            for i, (choice, own) in enumerate(zip(choices, np.split(numbers, ends, axis=1), strict=True))
        ]
        positions = torch.cat([positions for positions, _ in found])
        return Rows(self._inputs(texts.ravel(), sizes), labels, positions), [targets for _, targets in found]

    def _edit_batch(self, plan: Plan, wanted: Indices) -> EditBatch:
        sizes = self.edit_sizes
        conditions = self.conditions.at(plan.edited, plan.targets)
        lengths = self.condition_texts.lengths[conditions]
        ids = self.condition_texts.pick(conditions, sizes.fitting("conditions", lengths, TEXT_STEP))["input_ids"]
        rows = Rows(self._inputs(self.inputs[plan.edited], sizes), self._labels(wanted, sizes))
        return EditBatch(rows, Condition(ids, to_device(self.device, lengths)))

    def _edit_rows(self, plan: Plan, wanted: Indices) -> _RowChoice:
        """Returns the input and the paraphrases of each edit, which must get the new answer."""
        inputs = self.inputs[plan.edited][:, None]
        chosen = self.paraphrases.at(plan.edited[:, None], np.maximum(plan.paraphrases, 0))
        texts = np.concatenate([inputs, np.where(plan.paraphrases < 0, inputs, chosen)], 1)
        ones = np.ones_like(texts)
        return _RowChoice(texts, wanted[:, None] * ones, ones / texts.shape[1], 0 * ones)

    def _control_rows(self, controls: Indices) -> _RowChoice:
        """Returns one row per candidate of each control input.

        A missing candidate is replaced by the prediction, with weight 0.
        """
        candidates = np.arange(self.config.candidates)
        there = candidates < self.kept.counts[controls][..., None]  # (edits, controls, candidates)
        kept = self.kept.starts[controls][..., None] + np.where(there, candidates, 0)
        shape = (len(controls), -1)
        return _RowChoice(
            texts=np.repeat(self.inputs[controls], self.config.candidates, axis=1),
            targets=self.kept.flat[kept].reshape(shape),
            weights=(there / max(1, controls.shape[1])).reshape(shape),
            unedited_start=self.unedited_starts[kept].reshape(shape),
        )

    def _targets(
        self, choice: _RowChoice, numbers: Indices, labels: Tensor, total: int
    ) -> tuple[Tensor, ControlTargets]:
        """Returns the target positions of some rows, numbered row · width + token, and what is wanted there.

        `numbers` are the rows' indices in their group, and width is the number of answer tokens, padding included.
        """
        width = 1 if self.classes else labels.shape[1]
        lengths = self.target_lengths[choice.targets.ravel()]
        row, token = np.nonzero(np.arange(width) < lengths[:, None])
        weights = choice.weights.ravel()[row] / lengths[row] / total
        positions = to_device(self.device, numbers.ravel()[row] * width + token)
        return positions, ControlTargets(
            labels=labels.flatten().index_select(0, positions),
            weights=to_device(self.device, weights.astype(np.float32)),
            unedited_index=to_device(self.device, choice.unedited_start.ravel()[row] + token),
        )

    def _filled(
        self, positions: Tensor, targets: ControlTargets, sizes: Sizes, name: str
    ) -> tuple[Tensor, ControlTargets]:
        """Adds positions of weight 0, so that there are few different sizes."""
        count = len(positions)
        missing = sizes.fitting(name, np.array([count]), max(1, 2 ** count.bit_length() // 8)) - count
        if self.classes or not missing:
            return positions, targets
        filled = {name: F.pad(tensor, (0, missing)) for name, tensor in vars(targets).items()}
        filled["labels"] = F.pad(targets.labels, (0, missing), value=NO_TARGET)
        return F.pad(positions, (0, missing)), ControlTargets(**filled)

    def _inputs(self, texts: Indices, sizes: Sizes) -> dict[str, Tensor]:
        """Returns the model's inputs for some texts: (texts, tokens) each."""
        return self.texts.pick(texts, sizes.fitting("texts", self.texts.lengths[texts], TEXT_STEP))

    def _labels(self, targets: Indices, sizes: Sizes) -> Tensor:
        """Returns the labels of each row: (rows,) classes, or (rows, tokens)."""
        width = sizes.fitting("labels", self.target_lengths[targets], TARGET_STEP)
        picked = self.targets[to_device(self.device, targets), :width]
        return picked[:, 0] if self.classes else picked
