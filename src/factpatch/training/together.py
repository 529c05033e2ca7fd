"""Trains through the merge: computes the gradient of an editor whose edits are merged into one patch.

For one weight, with keys K and values V at the edits' tokens and M = KᵀK + λ N C, the merged change of N edits is
S = Vᵀ K M⁻¹ (merging.py). Three phases keep memory independent of N, as in MALMEN (Tan et al., 2024):

1. The edits are read in chunks, without gradients. KᵀK and KᵀV are summed, and S is solved.
2. The objective is evaluated on the model under S and differentiated: Γ = ∂L/∂S.
3. ∂L/∂V = K M⁻¹ Γᵀ. Each chunk is read again, and its part of ∂L/∂V is propagated back through the editor.

The ridge is learned with the editor, as ρ = log λ of each weight: ∂L/∂ρ = −λ N ⟨M⁻¹ Γᵀ, C Sᵀ⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from factpatch.covariance import Covariance
from factpatch.deltas import Delta, Dense
from factpatch.editors import Condition, EditBatch, TrainableEditor
from factpatch.engine import Trace
from factpatch.models import Rows
from factpatch.models.rows import NO_TARGET
from factpatch.solving import cholesky
from factpatch.training.batcher import StepBatch
from factpatch.training.graphs import Tensors
from factpatch.training.objective import Measured, Objective

EDITS_PER_CHUNK = {"cpu": 32, "cuda": 128}
FEWEST = 8  # number of edits merged at the beginning of a run


def merged_at(share: float, together: int) -> int:
    """How many edits are merged when a share of the run is done: doubling up to `together` over the first half."""
    sizes = [together]
    while sizes[0] > FEWEST:
        sizes.insert(0, max(FEWEST, sizes[0] // 2))
    return sizes[min(len(sizes) - 1, int(2 * share * len(sizes)))]


@dataclass(frozen=True)
class _Solved:
    """The solve of one weight, in float64."""

    S: Tensor  # (out, in)  the merged change
    root: Tensor  # (in, in)  lower Cholesky factor of M
    C: Tensor  # (in, in)
    ridge: float


class MergedGradients:
    """The gradients of a step whose edits are merged into one patch."""

    def __init__(self, editor: TrainableEditor, objective: Objective, covariance: Covariance):
        editor.learn_ridge()
        self.editor = editor
        self.objective = objective
        self.model = objective.model
        self.chunk = EDITS_PER_CHUNK[self.model.device.type]
        shared = {key: covariance.of(key, self.model.device) for key in covariance.moments}
        self.moments = {name: shared[key] for name, key in covariance.readers.items() if name in editor.shapes}

    def __call__(self, batch: StepBatch, whole: Callable[[Measured], Tensor]) -> Tensors:
        """The loss and the constraints, (1 + constraints,), then the gradient of each parameter of the editor.

        `whole` combines the objective's values into one number: the loss plus the multipliers' penalty.
        """
        edits = len(batch.edit_batch.rows)
        solved = self._solve(batch.edit_batch)
        changes = {name: one.S.float().requires_grad_() for name, one in solved.items()}
        with torch.enable_grad():
            measured = self.objective.measure(batch, {name: Dense(S[None]) for name, S in changes.items()})
            gammas = torch.autograd.grad(whole(measured), list(changes.values()))
        back = {  # M⁻¹ Γᵀ (in, out)
            name: torch.cholesky_solve(gamma.double().mT, one.root)
            for (name, one), gamma in zip(solved.items(), gammas, strict=True)
        }
        slopes = {name: -edits * one.ridge * (back[name] * (one.C @ one.S.mT)).sum() for name, one in solved.items()}
        zero = torch.zeros((), device=self.model.device)
        ridge_gradient = torch.stack([slopes.get(name, zero).float() for name in self.editor.shapes])
        gradients = self._through_editor(batch.edit_batch, back)
        figures = torch.cat([measured.loss[None], measured.constraints]).detach()
        named = zip(self.editor.named_parameters(), gradients, strict=True)
        return figures, *(ridge_gradient if name == "log_ridge" else gradient for (name, _), gradient in named)

    @torch.no_grad()
    def _solve(self, batch: EditBatch) -> dict[str, _Solved]:
        KK: dict[str, Tensor] = {}
        KV: dict[str, Tensor] = {}
        for part in self._chunks(batch):
            for name, K, V in self._keys_and_values(part):
                K, V = K.double(), V.double()
                KK[name] = KK[name].addmm_(K.mT, K) if name in KK else K.mT @ K  # (in, in)
                KV[name] = KV[name].addmm_(K.mT, V) if name in KV else K.mT @ V  # (in, out)
        ridges = self.editor.ridges()
        solved: dict[str, _Solved] = {}
        for name, products in KK.items():
            C, ridge = self.moments[name], ridges[name]
            root = cholesky(products.add_(C, alpha=len(batch.rows) * ridge))
            solved[name] = _Solved(torch.cholesky_solve(KV[name], root).mT, root, C, ridge)
        return solved

    def _through_editor(self, batch: EditBatch, back: dict[str, Tensor]) -> list[Tensor]:
        """Σ over chunks of (∂V/∂φ)ᵀ ∂L/∂V, with ∂L/∂V = K M⁻¹ Γᵀ."""
        parameters = list(self.editor.parameters())
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for part in self._chunks(batch):
            with torch.enable_grad():
                values, wanted = [], []
                for name, K, V in self._keys_and_values(part):
                    values.append(V)
                    wanted.append((K.double() @ back[name]).to(V.dtype))
                found = torch.autograd.grad(values, parameters, wanted, allow_unused=True)
            for gradient, more in zip(gradients, found, strict=True):
                if more is not None:
                    gradient += more
        return gradients

    def _chunks(self, batch: EditBatch) -> Iterator[EditBatch]:
        for start in range(0, len(batch.rows), self.chunk):
            part = slice(start, start + self.chunk)
            rows, condition = batch.rows, batch.condition
            assert rows.labels is not None
            yield EditBatch(
                Rows({key: values[part] for key, values in rows.inputs.items()}, rows.labels[part]),
                Condition(condition.ids[part], condition.lengths[part]),
            )

    def _keys_and_values(self, batch: EditBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For each weight, the layer's inputs at the edits' tokens, and what each edit's change adds to its outputs."""
        rows = _with_distinct_widths(batch.rows)
        traces = self.editor.trace(self.model, EditBatch(rows, batch.condition))
        for name, delta in self.editor(batch.condition, traces).items():
            if name in self.moments:
                X = traces[name].X.float()  # (edits, tokens, in)
                real = _real_tokens(rows, traces[name])
                yield name, X[real], _added(delta, X)[real]


def _added(delta: Delta, X: Tensor) -> Tensor:
    """What each edit's change adds to the layer's output: (edits, tokens, out)"""
    return delta.add_rows(X.new_zeros(*X.shape[:2], delta.shape[0]), X)


def _with_distinct_widths(rows: Rows) -> Rows:
    """Pads answers by one token if they are as wide as the inputs, so that the width shows which ones a layer reads."""
    labels = rows.labels
    if labels is None or labels.dim() == 1 or labels.shape[1] != rows.inputs["input_ids"].shape[1]:
        return rows
    return Rows(rows.inputs, F.pad(labels, (0, 1), value=NO_TARGET))


def _real_tokens(rows: Rows, trace: Trace) -> Tensor:
    """Which of the tokens that a layer reads are not padding: (edits, tokens)"""
    mask = rows.inputs["attention_mask"].bool()
    if trace.X.shape[1] == mask.shape[1]:
        return mask
    assert rows.labels is not None
    return rows.labels.ne(NO_TARGET)
