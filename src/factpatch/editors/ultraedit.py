"""UltraEdit (Gu et al., 2025): a closed-form edit from normalised gradients, without training.

For one weight, let K (tokens × in) hold the inputs at an edit's tokens. With û and ĝ, a token's input and output
gradient after normalising by a running mean and standard deviation,

    D = −η ‖û‖² ĝ,    ΔW = Dᵀ K (KᵀK + I)⁻¹ = Dᵀ (K Kᵀ + I)⁻¹ K

The second form solves a system that is only as large as the number of tokens, and is ΔW = Bᵀ A with A = K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from factpatch.data.revisions import Revision, edit_of
from factpatch.deltas import Delta, LowRank, add
from factpatch.editors.base import EditMethod, check_above_zero, split_stacks
from factpatch.editors.layer_choice import chosen_layers
from factpatch.editors.normalising import Moments, add_traces, normalised, with_gradient
from factpatch.engine import Trace, capture, edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.rows import in_batches
from factpatch.patch import Patch
from factpatch.solving import Sums

EDITS_PER_BATCH = 32  # edits in one forward pass
SAMPLE = 100  # edits whose mean and standard deviation normalise single edits; as many as in one turn


@dataclass(frozen=True)
class UltraEdit(EditMethod):
    """Edits each fact on its own, or many facts in turns, each on the model that the turns before it have edited."""

    layers: str = "mlp:3"
    lr: float = 1e-6  # η
    turn: int = 100  # edits of one turn, if many facts are edited together
    _moments: Mapping[str, Moments] = field(default_factory=dict, repr=False)  # of a sample of edits, by weight
    name = "ultraedit"
    needs_sample = True

    def __post_init__(self) -> None:
        check_above_zero(self, "lr", "turn")

    def edits_per_batch(self, model: TaskModel) -> int:
        return EDITS_PER_BATCH

    def calibrated(self, model: TaskModel, sample: Sequence[Revision]) -> Self:
        edits = [edit_of(revision) for revision in sample if revision.alternatives][:SAMPLE]
        moments: dict[str, Moments] = {}
        for batch in in_batches(edits, EDITS_PER_BATCH):
            moments = add_traces(moments, self._trace(model, batch))
        return replace(self, _moments=moments)

    def changes(self, model: TaskModel, edits: Sequence[FactEdit]) -> dict[str, Delta]:
        if not self._moments:
            raise InputError("ultraedit normalises gradients by those of other edits; calibrate it on some revisions")
        return {
            name: self._change(trace, self._moments[name])
            for name, trace in self._trace(model, model.resolve(edits)).items()
        }

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        patches: list[Patch] = []
        for batch in in_batches(model.resolve(edits), EDITS_PER_BATCH):
            patches += split_stacks(self.changes(model, batch), batch, model.fingerprint, self.name)
        return patches

    def propose_together(self, model: TaskModel, edits: Sequence[FactEdit]) -> Patch:
        edits = model.resolve(edits)
        moments: dict[str, Moments] = {}
        total: dict[str, Delta] = {}
        for turn in in_batches(edits, self.turn):
            traces = [self._trace(model, batch, total) for batch in in_batches(turn, EDITS_PER_BATCH)]
            for batch_traces in traces:
                moments = add_traces(moments, batch_traces)
            for name in traces[0]:
                change = self._joint_change(name, [batch_traces[name] for batch_traces in traces], moments[name])
                total[name] = add(total[name], change) if name in total else change
        return Patch(total, model.fingerprint, self.name, tuple(edits))

    def _trace(
        self, model: TaskModel, edits: Sequence[FactEdit], under: Mapping[str, Delta] | None = None
    ) -> dict[str, Trace]:
        """Captures each layer's inputs and output gradients, on the model as it is or `under` changes for all edits."""
        layers = chosen_layers(model, self.layers)
        rows = model.rows([edit.x for edit in edits], [edit.a for edit in edits])
        stacks = {  # with one entry each
            name: replace(delta, **{key: tensor[None] for key, tensor in delta.tensors.items()})
            for name, delta in (under or {}).items()
        }
        with edited(layers, stacks):
            return capture(layers, lambda: model.losses(rows))

    def _values(self, trace: Trace, moments: Moments) -> Tensor:
        """Computes D = −η ‖û‖² ĝ, which is zero at tokens without a gradient: (edits, tokens, out)."""
        u, g = normalised(trace, moments.mean, moments.std)
        return -self.lr * u.square().sum(-1, keepdim=True) * g

    def _change(self, trace: Trace, moments: Moments) -> LowRank:
        """Returns A = K and B = (K Kᵀ + I)⁻¹ D of each edit."""
        K = (trace.X * with_gradient(trace)[..., None]).double()  # (edits, tokens, in)
        gram = K @ K.mT + torch.eye(K.shape[1], dtype=K.dtype, device=K.device)
        B = torch.linalg.solve(gram, self._values(trace, moments).double())
        return LowRank(K.to(trace.X.dtype), B.to(trace.X.dtype))

    def _joint_change(self, name: str, traces: Sequence[Trace], moments: Moments) -> Delta:
        """Returns ΔW = Dᵀ K (KᵀK + I)⁻¹ for all edits of a turn."""
        sums = Sums(traces[0].X.shape[-1])
        for trace in traces:
            real = with_gradient(trace)
            sums.add(trace.X[real].double(), {name: self._values(trace, moments)[real].double()})
        identity = torch.eye(sums.width, dtype=torch.float64, device=traces[0].X.device)
        (change,) = sums.solve(identity, {name: 1.0}, edits=1).values()
        return replace(change, **{key: tensor.to(traces[0].X.dtype) for key, tensor in change.tensors.items()})
