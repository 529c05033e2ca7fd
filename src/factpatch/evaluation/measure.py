"""Edits against paraphrases and other inputs: many edits in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from factpatch.backends import no_cudnn_attention
from factpatch.constraints import kl
from factpatch.data.revisions import Revision, edit_of
from factpatch.deltas import Delta
from factpatch.editors import EditMethod
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.facts import same
from factpatch.metrics import Others, Outcome, outcome
from factpatch.models import Rows, TaskModel
from factpatch.models.base import NO_TARGET, POSITIONS_AT_ONCE


def predicted_now(model: TaskModel, revisions: Sequence[Revision]) -> list[Revision]:
    """With the model's predictions of now: in another precision, or on another machine, near ties may turn.

    Where many predictions do, the revisions are another model's, and would mean nothing to this one.
    """
    said = model.predict([revision.input for revision in revisions], cut=True)
    agreeing = sum(same(text, revision.prediction) for text, revision in zip(said, revisions, strict=True))
    turned = len(said) - agreeing
    # Two classifiers of two labels agree on half; of a few inputs, two may be near ties.
    if turned > len(said) / 2 or (not model.near_ties and turned > max(2, len(said) / 10)):
        raise InputError(
            f"the model says what the revision file expects for {agreeing} of {len(said)} inputs only; "
            "make the file anew with this model: factpatch revise"
        )
    return [replace(revision, prediction=text) for revision, text in zip(revisions, said, strict=True)]


def measure(
    method: EditMethod,
    model: TaskModel,
    revisions: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda edits: None,
) -> list[Outcome]:
    """Edits each revision to its likeliest alternative, and looks at what the edited model says.

    Each edit is made and measured on its own; that they share forwards changes no result.
    """
    return [examined.outcome for _, examined in examine_all(method, model, revisions, others, on_done)]


def examine_all(
    method: EditMethod,
    model: TaskModel,
    revisions: Sequence[Revision],
    others: Sequence[Revision],
    on_done: Callable[[int], object] = lambda edits: None,
) -> Iterator[tuple[Revision, Examined]]:
    """The same, with all that the edited model says."""
    size = method.at_once(model)
    examiner = Examiner(model, others, size)
    for start in range(0, len(revisions), size):
        batch = revisions[start : start + size]
        changes = method.changes(model, [edit_of(revision) for revision in batch])
        yield from zip(batch, examiner.examine(changes, batch), strict=True)
        on_done(len(batch))


@dataclass(frozen=True)
class Examined:
    """One edit, looked at."""

    outcome: Outcome
    says: dict[str, str]  # to x and its paraphrases
    says_others: list[str]
    scores: NDArray[np.float32] | None  # of the other inputs' original predictions, where asked for


@dataclass(frozen=True)
class _Batch:
    """Other inputs of like length, with what the unedited model makes of them."""

    numbers: list[int]
    rows: Rows
    before: Tensor | None  # (places, width)  features
    row: Tensor | None  # (places,)  whose place each is


class Examiner:
    """Other inputs to try edits on. What the unedited model makes of them is computed once."""

    @torch.no_grad()
    @no_cudnn_attention()
    def __init__(self, model: TaskModel, others: Sequence[Revision], edits: int = 32, scores: bool = False):
        """`edits` run side by side; with `scores`, how far the scores of predictions move is measured too."""
        self.model = model
        self.scores = scores
        self.edits = edits
        self.parts = 1  # that the device's memory makes of what is usually one batch
        self.encoded = model.encode([other.input for other in others], model.max_input_tokens)
        self.others = others
        self.known = Others(others)
        self.targets = model.encode_targets([other.prediction for other in others]) if scores else None
        self._make_batches()

    def _make_batches(self) -> None:
        lengths = [len(one["input_ids"]) * self.edits * self.parts for one in self.encoded]
        self.batches = [self._batch(batch) for batch in self.model.batches(lengths)]
        # Where each input stands among those of all batches, end to end.
        self.place = np.argsort([number for batch in self.batches for number in batch.numbers])
        self.scores_before: NDArray[np.float32] | None = None
        if self.scores:
            found = [self._scores(batch, batch.before, 1)[0] for batch in self.batches]
            self.scores_before = torch.cat(found, 1)[0].cpu().numpy()[self.place]

    def _batch(self, numbers: list[int]) -> _Batch:
        targets = [self.targets[i] for i in numbers] if self.targets else None
        rows = self.model.collate([self.encoded[i] for i in numbers], targets)
        if targets is None:
            return _Batch(numbers, rows, None, None)
        labels = rows.labels
        assert labels is not None
        places = labels.flatten().ne(NO_TARGET).nonzero().squeeze(1)
        rows = replace(rows, target_positions=places)
        width = labels.shape[1] if labels.dim() == 2 else 1
        return _Batch(numbers, rows, self.model.features(rows), places // width)

    @torch.no_grad()
    @no_cudnn_attention()
    def examine(self, changes: Mapping[str, Delta], revisions: Sequence[Revision]) -> list[Examined]:
        """What each edit's change does to its own texts and to all others."""
        try:
            return self._examine(changes, revisions)
        except torch.cuda.OutOfMemoryError:
            if all(len(batch.numbers) == 1 for batch in self.batches):
                raise
        torch.cuda.empty_cache()
        self.parts *= 2
        self._make_batches()
        return self.examine(changes, revisions)

    def _examine(self, changes: Mapping[str, Delta], revisions: Sequence[Revision]) -> list[Examined]:
        own_texts = [[r.input, *r.rephrases, *r.human_rephrases] for r in revisions]
        edits = len(revisions)
        with edited(self.model.layers, changes):
            own = _say_each(self.model, own_texts, self.parts)
            asked = [self._ask(batch, edits) for batch in self.batches]
        scores = moved = None
        if self.scores:
            scores, moved = (
                torch.cat([part[k] for part in asked], 1).cpu().numpy()[:, self.place] for k in (1, 2)
            )  # (edits, inputs)
            for revision, of_edit in zip(revisions, moved, strict=True):
                if not np.isfinite(of_edit).all():
                    raise InputError(f"edited, the model's scores are not finite any more; the edit is {revision.id}")
        found = []
        for e, revision in enumerate(revisions):
            says = dict(zip(own_texts[e], own[e], strict=True))
            said = [text for part in asked for text in part[0][e]]
            says_others = [said[i] for i in self.place]
            target = edit_of(revision).a
            result = outcome(revision, target, says, self.known, says_others, None if moved is None else moved[e])
            found.append(Examined(result, says, says_others, None if scores is None else scores[e]))
        return found

    def _ask(self, batch: _Batch, edits: int) -> tuple[list[list[str]], Tensor | None, Tensor | None]:
        """What every edit says to the batch; scores and KL of what was said before. Each (edits, inputs)."""
        inputs = {key: tensor.repeat(edits, 1) for key, tensor in batch.rows.inputs.items()}
        said: list[str] | None = None
        scores = moved = None
        if self.scores:
            features = self.model.features(self._repeated(batch, inputs, edits))
            said = self.model.answers_from(features)
            scores, moved = self._scores(batch, features, edits)
        if said is None:
            said = [ranked[0] for ranked in self.model.decide(Rows(inputs), edits=edits)]
        count = len(batch.numbers)
        return [said[e * count : (e + 1) * count] for e in range(edits)], scores, moved

    def _repeated(self, batch: _Batch, inputs: dict[str, Tensor], edits: int) -> Rows:
        labels, places = batch.rows.labels, batch.rows.target_positions
        assert labels is not None
        assert places is not None
        offsets = torch.arange(edits, device=places.device)[:, None] * labels.numel()
        shape = (edits, *(1,) * (labels.dim() - 1))
        return Rows(inputs, labels.repeat(*shape), (offsets + places).flatten())

    def _scores(self, batch: _Batch, features: Tensor | None, edits: int) -> tuple[Tensor, Tensor]:
        """(edits, inputs) each: the score of the original prediction, and the KL to what was there before."""
        assert features is not None
        assert batch.before is not None
        assert batch.row is not None
        assert batch.rows.labels is not None
        assert batch.rows.target_positions is not None
        labels = batch.rows.labels.flatten()[batch.rows.target_positions]
        places = len(labels)
        log_p, moved = [], []
        for start in range(0, places, POSITIONS_AT_ONCE // edits or 1):
            part = slice(start, start + (POSITIONS_AT_ONCE // edits or 1))
            before = self.model.scores(batch.before[part])  # (places, classes)
            after = self.model.scores(features.view(edits, places, -1)[:, part])  # (edits, places, classes)
            log_p.append(-F.cross_entropy(after.movedim(-1, 1), labels[part].expand(edits, -1), reduction="none"))
            moved.append(kl(before.expand_as(after), after))
        tokens = torch.bincount(batch.row, minlength=len(batch.numbers))

        def mean_over_tokens(values: list[Tensor]) -> Tensor:
            sums = torch.zeros(edits, len(batch.numbers), device=labels.device)
            return sums.index_add(1, batch.row, torch.cat(values, 1)) / tokens

        score = mean_over_tokens(log_p)
        # Of labels, log-odds: probabilities near 1 would all look alike.
        if batch.rows.labels.dim() == 1:
            score = score - torch.log1p(-score.exp().clamp(max=1 - 1e-7))
        return score, mean_over_tokens(moved)


def _say_each(model: TaskModel, texts: list[list[str]], parts: int) -> list[list[str]]:
    """What each edit says to its own texts. Edits with fewer texts say their first again, so that rows line up."""
    most = max(map(len, texts))
    columns = [[own[k] if k < len(own) else own[0] for own in texts] for k in range(most)]
    encoded = [model.encode(column, model.max_input_tokens) for column in columns]
    lengths = [max(len(one["input_ids"]) for one in column) * len(texts) * parts for column in encoded]
    said: list[list[str]] = [[""] * most for _ in texts]
    for batch in model.batches(lengths):
        rows = model.collate([encoded[k][e] for e in range(len(texts)) for k in batch])
        decided = iter(model.decide(rows, edits=len(texts)))
        for e in range(len(texts)):
            for k in batch:
                said[e][k] = next(decided)[0]
    return [own[: len(mine)] for own, mine in zip(said, texts, strict=True)]
