"""Trains through the merge: computes the gradient of an editor whose edits are merged into one patch.

For one weight, with keys K and values V at the edits' tokens and M = KᵀK + λ N C, the merged change of N edits is
S = Vᵀ K M⁻¹ (merging.py). Three phases keep memory independent of N, as in MALMEN (Tan et al., 2024):

1. The edits are read in chunks, without gradients. KᵀK and KᵀV are summed, and S is solved.
2. The objective is evaluated on the model under S and differentiated: Γ = ∂L/∂S.
3. ∂L/∂V = K M⁻¹ Γᵀ. Each chunk is read again, and its part of ∂L/∂V is propagated back through the editor.

The ridge is learned with the editor, as ρ = log λ of each weight: ∂L/∂ρ = −λ N ⟨M⁻¹ Γᵀ, C Sᵀ⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from factpatch.covariance import Covariance
from factpatch.deltas import Delta, Dense
from factpatch.editors import EditBatch, TrainableEditor
from factpatch.editors.least_squares import real_tokens, with_distinct_widths
from factpatch.grouping import keys_by_value
from factpatch.models import Rows
from factpatch.solving import cholesky
from factpatch.training.batcher import StepBatch
from factpatch.training.graphs import Tensors
from factpatch.training.objective import Measured, Objective

CPU_CHUNK_BYTES = 1 << 30  # memory for what a chunk of edits keeps for its backward pass
GPU_CHUNK_SHARE = 0.25  # the same on a GPU, as a share of its memory
COPIES = 8  # of a layer's inputs and outputs, in float32, that a chunk keeps: X, D, factors, values, gradients
FEWEST = 8  # number of edits merged at the beginning of a run


def merged_at(share: float, together: int) -> int:
    """Returns how many edits are merged at this share of the run: doubling up to `together` over the first half."""
    sizes = [together]
    while sizes[0] > FEWEST:
        sizes.insert(0, max(FEWEST, sizes[0] // 2))
    return sizes[min(len(sizes) - 1, int(2 * share * len(sizes)))]


@dataclass(frozen=True)
class _Solved:
    """The solves of all weights of one shape, in float64."""

    names: list[str]
    S: Tensor  # (weights, out, in)  the merged changes
    root: Tensor  # (weights, in, in)  lower Cholesky factors of M


class MergedGradients:
    """Computes the gradients of a step whose edits are merged into one patch."""

    def __init__(self, editor: TrainableEditor, objective: Objective, covariance: Covariance):
        editor.learn_ridge()
        self.editor = editor
        self.objective = objective
        self.model = objective.model
        self.readers = {name: key for name, key in covariance.readers.items() if name in editor.shapes}
        self.moments = {key: covariance.of(key, self.model.device) for key in dict.fromkeys(self.readers.values())}
        self.by_shape = keys_by_value({name: editor.shapes[name] for name in self.readers})

    def __call__(self, batch: StepBatch, whole: Callable[[Measured], Tensor]) -> Tensors:
        """Computes the loss and the constraints, (1 + constraints,), and the gradient of each editor parameter.

        `whole` combines the objective's values into one number: the loss plus the multipliers' penalty.
        """
        edits, ridges = len(batch.edit_batch.rows), self.editor.ridges()
        solved = self._solve(batch.edit_batch, ridges)
        changes = {
            name: S.float().requires_grad_() for group in solved for name, S in zip(group.names, group.S, strict=True)
        }
        with torch.enable_grad():
            measured = self.objective.measure(batch, {name: Dense(S[None]) for name, S in changes.items()})
            gammas = torch.autograd.grad(whole(measured), list(changes.values()))
        gamma_of = dict(zip(changes, gammas, strict=True))
        back: dict[str, Tensor] = {}  # M⁻¹ Γᵀ (in, out)
        slopes = torch.zeros(len(self.editor.shapes), device=self.model.device)
        index = {name: i for i, name in enumerate(self.editor.shapes)}
        for group in solved:
            gamma = torch.stack([gamma_of[name] for name in group.names]).double()  # (weights, out, in)
            for name, S, found in zip(group.names, group.S, torch.cholesky_solve(gamma.mT, group.root), strict=True):
                back[name] = found
                C = self.moments[self.readers[name]]
                slopes[index[name]] = -edits * ridges[name] * (found * (C @ S.mT)).sum()
        gradients = self._through_editor(batch.edit_batch, back)
        figures = torch.cat([measured.loss[None], measured.constraints]).detach()
        named = zip(self.editor.named_parameters(), gradients, strict=True)
        return figures, *(slopes if name == "log_ridge" else gradient for (name, _), gradient in named)

    @torch.no_grad()
    def _solve(self, batch: EditBatch, ridges: Mapping[str, float]) -> list[_Solved]:
        KK: dict[str, Tensor] = {}  # KᵀK (in, in), by the first weight that reads K
        KV: dict[str, Tensor] = {}  # KᵀV (in, out)
        for part in self._chunks(batch):
            seen: set[str] = set()
            for name, K, V in self._keys_and_values(part):
                K, V, key = K.double(), V.double(), self.readers[name]
                if key not in seen:
                    KK[key] = KK[key].addmm_(K.mT, K) if key in KK else K.mT @ K
                    seen.add(key)
                KV[name] = KV[name].addmm_(K.mT, V) if name in KV else K.mT @ V
        solved: list[_Solved] = []
        for names in self.by_shape.values():
            M = torch.stack(
                [KK[key] + len(batch.rows) * ridges[n] * self.moments[key] for n in names for key in [self.readers[n]]]
            )
            root = cholesky(M)
            S = torch.cholesky_solve(torch.stack([KV.pop(name) for name in names]), root).mT
            solved.append(_Solved(names, S, root))
        return solved

    def _through_editor(self, batch: EditBatch, back: dict[str, Tensor]) -> list[Tensor]:
        """Computes Σ over chunks of (∂V/∂φ)ᵀ ∂L/∂V, with ∂L/∂V = K M⁻¹ Γᵀ."""
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
        chunk = self._edits_per_chunk(batch.rows)
        for start in range(0, len(batch.rows), chunk):
            yield batch.part(slice(start, start + chunk))

    def _edits_per_chunk(self, rows: Rows) -> int:
        widest = max(mask.shape[1] for mask in real_tokens(self.model, rows))
        edit_bytes = 4 * COPIES * widest * sum(sum(self.editor.shapes[name]) for name in self.readers)
        budget = CPU_CHUNK_BYTES
        if self.model.device.type == "cuda":
            budget = int(GPU_CHUNK_SHARE * torch.cuda.get_device_properties(self.model.device).total_memory)
        return max(1, budget // edit_bytes)

    def _keys_and_values(self, batch: EditBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields each weight's name, its inputs at the edits' tokens, and what the changes add to its outputs."""
        rows = with_distinct_widths(batch.rows)
        traces = self.editor.trace(self.model, EditBatch(rows, batch.condition))
        real = {mask.shape[1]: mask.flatten().nonzero()[:, 0] for mask in real_tokens(self.model, rows)}
        for name, delta in self.editor(batch.condition, traces).items():
            if name in self.readers:
                X = traces[name].X.float()  # (edits, tokens, in)
                tokens = real[X.shape[1]]
                yield name, X.flatten(0, 1)[tokens], _added(delta, X).flatten(0, 1)[tokens]


def _added(delta: Delta, X: Tensor) -> Tensor:
    """Returns what each edit's change adds to the layer's output: (edits, tokens, out)."""
    return delta.add_rows(X.new_zeros(*X.shape[:2], delta.shape[0]), X)
