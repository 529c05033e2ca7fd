"""Measures edits on their paraphrases and on control inputs, with many edits in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention
from factpatch.constraints import kl
from factpatch.data.revisions import Neighbour, Revision, edit_of, measured_texts
from factpatch.deltas import Delta
from factpatch.editors import EditMethod
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.evaluation.batches import edit_major_batches, encode_lists, padded_lists
from factpatch.evaluation.forced import forced_accuracies
from factpatch.evaluation.outcomes import ControlInputs, outcome
from factpatch.metrics import Outcome
from factpatch.models import Rows, TaskModel
from factpatch.models.rows import POSITIONS_PER_BATCH, Encoded, in_batches


def predicted_now(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """Replaces the predictions in revisions with the model's current ones.

    In another precision or on another machine, predictions that are nearly ties can differ from those in the file.
    """
    neighbours = list(dict.fromkeys(one.input for revision in revisions for one in revision.neighbours))
    answers = model.predict([*(revision.input for revision in revisions), *neighbours], cut=True)
    beside = dict(zip(neighbours, answers[len(revisions) :], strict=True))
    return [
        replace(r, prediction=text, neighbours=tuple(Neighbour(n.input, beside[n.input]) for n in r.neighbours))
        for r, text in zip(revisions, answers, strict=False)
    ]


def measure(
    method: EditMethod,
    model: TaskModel,
    revisions: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda edits: None,
) -> list[Outcome]:
    """Edits each revision to its most likely alternative and measures the edited model on the control inputs `others`.

    Each edit is made and measured on its own; sharing forward passes does not change the results.
    """
    return [examined.outcome for _, examined in examine_all(method, model, revisions, others, on_done)]


def examine_all(
    method: EditMethod,
    model: TaskModel,
    revisions: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda edits: None,
) -> Iterator[tuple[Revision, Examined]]:
    """Does the work of `measure`, and yields each revision with all answers of the edited model."""
    size = method.edits_per_batch(model)
    examiner = Examiner(model, others, size)
    for batch in in_batches(revisions, size):
        changes = method.changes(model, [edit_of(revision) for revision in batch])
        yield from zip(batch, examiner.examine(changes, batch), strict=True)
        on_done(len(batch))


@dataclass(frozen=True)
class Examined:
    """One edit with the answers of the edited model."""

    outcome: Outcome
    says: dict[str, str]  # answers to x and its paraphrases, by text
    says_others: list[str]  # answers to the control inputs
    scores: NDArray[np.float32] | None  # scores of the control inputs' original predictions, if measured


@dataclass(frozen=True)
class _Batch:
    """Control inputs of similar length, with the unedited model's features if scores are measured.

    The rows' labels are the unedited model's answers, if these are needed.
    """

    indices: list[int]
    rows: Rows
    before: Tensor | None  # (positions, width)  features


@dataclass(frozen=True)
class _Answers:
    """The edited models' answers to a batch, with scores and KL if measured."""

    texts: list[list[str | None]]  # by edit, then by input; None if the answer is yet to be found
    scores: Tensor | None  # (edits, inputs)
    kl: Tensor | None  # (edits, inputs)


class Examiner:
    """Runs edited models on control inputs. The unedited model's features are computed only once."""

    @torch.no_grad()
    @no_cudnn_attention()
    def __init__(self, model: TaskModel, others: Sequence[Revision], edits: int = 32, scores: bool = False):
        """`edits` is the number per forward pass. With `scores`, changes of scores and KL are measured too."""
        self.model = model
        self.scores = scores
        self.edits = edits
        self.parts = 1  # by which batches are divided to fit the device's memory
        self.encoded = model.encode([other.input for other in others], model.max_input_tokens)
        self.others = others
        self.by_length = sorted(range(len(others)), key=lambda i: len(self.encoded[i]["input_ids"]))
        self.controls = ControlInputs(others)
        self.answers = model.answers_to_confirm(self.encoded)
        self.targets: list[Any] | None = None
        if self.answers is not None:
            self.targets = [tokens for _, tokens in self.answers]
        elif scores:
            self.targets = model.encode_targets([other.prediction for other in others])
        self._make_batches()

    def _make_batches(self) -> None:
        tokens = [len(one["input_ids"]) for one in self.encoded]
        if self.answers is not None:  # read together with the prompts
            tokens = [count + len(answer) for count, (_, answer) in zip(tokens, self.answers, strict=True)]
        lengths = [count * self.edits * self.parts for count in tokens]
        self.batches = [self._batch(batch) for batch in self.model.batches(lengths)]
        # The index of each input in the concatenation of all batches.
        self.position = np.argsort([index for batch in self.batches for index in batch.indices])
        self.scores_before: NDArray[np.float32] | None = None
        if self.scores:
            scores = [self._scores(batch, batch.before, 1)[0] for batch in self.batches]
            self.scores_before = torch.cat(scores, 1)[0].cpu().numpy()[self.position]

    def _batch(self, indices: list[int]) -> _Batch:
        encoded = [self.encoded[i] for i in indices]
        if self.targets is None:
            return _Batch(indices, self.model.collate(encoded), None)
        rows = self.model.collate(encoded, [self.targets[i] for i in indices]).at_targets()
        return _Batch(indices, rows, self.model.features(rows) if self.scores else None)

    def examine(self, changes: Mapping[str, Delta], revisions: Sequence[Revision]) -> list[Examined]:
        """Measures a stack of changes, one per revision."""
        return [examined for (examined,) in self.examine_groups(changes, [[revision] for revision in revisions])]

    @torch.no_grad()
    @no_cudnn_attention()
    def examine_groups(
        self, changes: Mapping[str, Delta], groups: Sequence[Sequence[Revision]]
    ) -> list[list[Examined]]:
        """Measures a stack of changes, each of which edits a group of revisions together."""
        try:
            return self._examine(changes, groups)
        except torch.cuda.OutOfMemoryError:
            if all(len(batch.indices) == 1 for batch in self.batches):
                raise
        torch.cuda.empty_cache()
        self.parts *= 2
        self._make_batches()
        return self.examine_groups(changes, groups)

    def _examine(self, changes: Mapping[str, Delta], groups: Sequence[Sequence[Revision]]) -> list[list[Examined]]:
        texts = [[text for revision in group for text in measured_texts(revision)] for group in groups]
        with edited(self.model.layers, changes):
            answers = _answer_each(self.model, encode_lists(self.model, texts), self.parts)
            forced = forced_accuracies(self.model, groups, self.parts) if self.scores else [{}] * len(groups)
            answered = [self._ask(batch, len(groups)) for batch in self.batches]
            says_others = self._complete(
                [[text for one in answered for text in one.texts[e]] for e in range(len(groups))]
            )
        all_scores, all_kl = self._in_order([a.scores for a in answered]), self._in_order([a.kl for a in answered])
        examined: list[list[Examined]] = []
        for e, group in enumerate(groups):
            scores, divergence = (None if values is None else values[e] for values in (all_scores, all_kl))
            if divergence is not None and not np.isfinite(divergence).all():
                raise InputError(f"scores are not finite after the edit of {group[0].id}; try --precision fp32")
            says = dict(zip(texts[e], answers[e], strict=True))
            outcomes = (
                outcome(r, edit_of(r).a, says, self.controls, says_others[e], divergence, group, forced[e].get(r.id))
                for r in group
            )
            examined.append([Examined(one, says, says_others[e], scores) for one in outcomes])
        return examined

    def _in_order(self, parts: list[Tensor | None]) -> NDArray[np.float32] | None:
        """Concatenates the batches' values to (edits, inputs), in the order of the control inputs."""
        measured = [part for part in parts if part is not None]
        return torch.cat(measured, 1).cpu().numpy()[:, self.position] if measured else None

    def _ask(self, batch: _Batch, edits: int) -> _Answers:
        inputs = {key: tensor.repeat(edits, 1) for key, tensor in batch.rows.inputs.items()}
        count = len(batch.indices)
        texts: Sequence[str | None] | None = None
        scores = divergences = None
        if self.targets is not None:
            rows = self._repeated(batch, inputs, edits)
            features = self.model.features(rows)
            texts = self.model.answers_from(features)
            if self.scores:
                scores, divergences = self._scores(batch, features, edits)
            if self.answers is not None:
                known = [self.answers[i][0] for i in batch.indices] * edits
                still = self.model.still_answers(rows, features).tolist()
                texts = [text if confirmed else None for text, confirmed in zip(known, still, strict=True)]
        if texts is None:  # answering needs a search
            texts = [ranked[0] for ranked in self.model.decide(Rows(inputs), edits=edits)]
        return _Answers([list(texts[e * count : (e + 1) * count]) for e in range(edits)], scores, divergences)

    def _complete(self, by_batch: list[list[str | None]]) -> list[list[str]]:
        """Returns the answers to the control inputs, in their order, and searches for those that are missing.

        `by_batch` has each edit's answers in the order of the batches.
        """
        texts = [[answers[i] for i in self.position] for answers in by_batch]
        missing = [[i for i in self.by_length if answers[i] is None] for answers in texts]
        if any(missing):
            asked = [[self.encoded[i] for i in own or self.by_length[:1]] for own in missing]  # at least one of each
            for answers, own, searched in zip(texts, missing, _answer_each(self.model, asked, self.parts), strict=True):
                for i, text in zip(own, searched, strict=False):
                    answers[i] = text
        return [[text for text in answers if text is not None] for answers in texts]

    def _repeated(self, batch: _Batch, inputs: dict[str, Tensor], edits: int) -> Rows:
        labels, positions = batch.rows.labels, batch.rows.target_positions
        assert labels is not None
        assert positions is not None
        offsets = torch.arange(edits, device=positions.device)[:, None] * labels.numel()
        shape = (edits, *(1,) * (labels.dim() - 1))
        return Rows(inputs, labels.repeat(*shape), (offsets + positions).flatten())

    def _scores(self, batch: _Batch, features: Tensor | None, edits: int) -> tuple[Tensor, Tensor]:
        """Returns scores of the original predictions, and KL from the unedited model: (edits, inputs) each."""
        assert features is not None
        assert batch.before is not None
        assert batch.rows.labels is not None
        labels, row_of_position = batch.rows.target_labels, batch.rows.row_of_position
        positions, step = len(labels), POSITIONS_PER_BATCH // edits or 1
        log_p, divergences = [], []
        for start in range(0, positions, step):
            part = slice(start, start + step)
            before = self.model.scores(batch.before[part])  # (positions, classes)
            after = self.model.scores(features.view(edits, positions, -1)[:, part])  # (edits, positions, classes)
            log_p.append(-F.cross_entropy(after.movedim(-1, 1), labels[part].expand(edits, -1), reduction="none"))
            divergences.append(kl(before.expand_as(after), after))
        tokens = torch.bincount(row_of_position, minlength=len(batch.indices))

        def mean_over_tokens(values: list[Tensor]) -> Tensor:
            sums = torch.zeros(edits, len(batch.indices), device=labels.device)
            return sums.index_add(1, row_of_position, torch.cat(values, 1)) / tokens

        score = mean_over_tokens(log_p)
        # Log-odds for labels: a figure could not distinguish log-probabilities near 0.
        if batch.rows.labels.dim() == 1:
            score = score - torch.log1p(-score.exp().clamp(max=1 - 1e-7))
        return score, mean_over_tokens(divergences)


def _answer_each(model: TaskModel, encoded: list[list[Encoded]], parts: int) -> list[list[str]]:
    """Answers the texts of each edit."""
    asked = padded_lists(encoded)
    answers = [[""] * len(row) for row in asked]
    for places, batch in edit_major_batches(model, asked, parts):
        decided = model.decide(model.collate(batch), edits=len(asked))
        for (edit, index), ranked in zip(places, decided, strict=True):
            answers[edit][index] = ranked[0]
    return [row[: len(own)] for row, own in zip(answers, encoded, strict=True)]
