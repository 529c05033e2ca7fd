"""MEMIT (Meng et al., 2023): writes facts into a few feed-forward layers of a decoder.

At the last token of the fact's subject, a hidden state z after block L is optimised so that the model gives the target.
The difference from the present hidden state h is then spread over the down-projections of the blocks up to L. With k,
the down-projection's input at that token, and r = (z − h) / (number of blocks left), the change of each weight is

    ΔW = R Kᵀ (λ C + K Kᵀ)⁻¹

where the columns of K and R are the k and r of all edits that are made together, and C is the mean of k kᵀ over the
tokens of ordinary texts. For one edit, with k̃ = (λ C)⁻¹ k, this is the rank-one change r k̃ᵀ / (1 + kᵀk̃).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from factpatch.covariance import Covariance
from factpatch.data.revisions import Revision
from factpatch.deltas import Delta, LowRank
from factpatch.editors.base import EditMethod, check_above_zero, split_stacks
from factpatch.editors.subject_tokens import Located, locate
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.facts import FactEdit
from factpatch.models import TaskModel
from factpatch.models.layers import feed_forward_weights
from factpatch.models.rows import in_batches
from factpatch.patch import Patch
from factpatch.solving import Sums, cholesky

EDITS_PER_BATCH = 16  # edits in one forward pass, each with all its contexts
TEXTS = 2000  # texts that C is computed from
DEPTH = 0.3  # relative depth of block L, unless `last` names one; the published choices are between 0.25 and 0.35


@dataclass(frozen=True)
class Memit(EditMethod):
    """Edits each fact on its own, or many facts together."""

    last: int | None = None  # number of block L, from 0
    blocks: int = 5  # blocks that are edited, up to L
    ridge: float = 15_000.0  # λ
    lr: float = 0.5  # Adam's learning rate for z
    steps: int = 25
    clamp: float = 0.75  # maximum norm of z − h, relative to h
    decay: float = 0.5  # penalty on the norm of z − h, relative to the square of that of h
    contexts: int = 4  # number of texts put before x, besides x alone, so that z also works in other contexts
    _covariance: Covariance | None = field(default=None, repr=False)
    _prefixes: tuple[str, ...] = field(default=(), repr=False)
    name = "memit"
    needs_sample = True

    def __post_init__(self) -> None:
        check_above_zero(self, "blocks", "ridge", "lr", "steps", "clamp")

    def edits_per_batch(self, model: TaskModel) -> int:
        return EDITS_PER_BATCH

    def describe(self, model: TaskModel) -> dict[str, Any]:
        blocks = list(self._weights(model))
        return {**super().describe(model), "layers": f"{blocks[0]} to {blocks[-1]}"}

    def calibrated(self, model: TaskModel, sample: Sequence[Revision]) -> Self:
        weights = self._weights(model)
        known = {revision.input: revision.prediction for revision in sample[:TEXTS]}
        covariance = Covariance.compute(model, known, known, set(weights.values()))
        shortest = sorted(sample[:TEXTS], key=lambda r: (len(r.input) + len(r.prediction), r.id))[: self.contexts]
        return replace(self, _covariance=covariance, _prefixes=tuple(f"{r.input} {r.prediction}. " for r in shortest))

    def propose(self, model: TaskModel, edits: Sequence[FactEdit]) -> list[Patch]:
        patches: list[Patch] = []
        for batch in in_batches(model.resolve(edits), EDITS_PER_BATCH):
            located = locate(model, batch, self._prefixes)
            stacks = self._spread(model, [located], self._optimised(model, located), self._single)
            patches += split_stacks(stacks, batch, model.fingerprint, self.name)
        return patches

    def propose_together(self, model: TaskModel, edits: Sequence[FactEdit]) -> Patch:
        edits = model.resolve(edits)
        located = [locate(model, batch, self._prefixes) for batch in in_batches(edits, EDITS_PER_BATCH)]
        z = torch.cat([self._optimised(model, one) for one in located])
        stacks = self._spread(model, located, z, self._joint)
        deltas = {n: replace(d, **{key: tensor[0] for key, tensor in d.tensors.items()}) for n, d in stacks.items()}
        return Patch(deltas, model.fingerprint, self.name, tuple(edits))

    def _weights(self, model: TaskModel) -> dict[str, str]:
        """Returns the down-projections to edit, by block: the last feed-forward weight of each."""
        if model.kind != "causal":
            raise InputError(f"the method memit edits decoders only, and this model is a {model.kind}; choose another")
        found = feed_forward_weights(model.model, model.layers)
        last = int(DEPTH * len(found)) if self.last is None else self.last
        if not 0 <= last < len(found):
            raise InputError(f"the model has blocks 0 to {len(found) - 1}, found last={last}; choose one of these")
        return {block: names[-1] for block, names in list(found.items())[max(0, last + 1 - self.blocks) : last + 1]}

    def _optimised(self, model: TaskModel, located: Located) -> Tensor:
        """Optimises z for each edit: (edits, hidden)."""
        block = model.model.get_submodule(list(self._weights(model))[-1])
        edits = located.edits
        before = _hidden_states(model, located, block)[:, 0]  # (edits, hidden), of x alone
        change = torch.zeros_like(before, requires_grad=True)
        optimizer = torch.optim.Adam([change], lr=self.lr)
        norms = before.norm(dim=-1, keepdim=True)

        def shift(_: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            where = (torch.arange(len(hidden), device=hidden.device), located.positions)
            added = change.repeat_interleave(len(hidden) // edits, 0).to(hidden.dtype)
            moved = hidden.index_put(where, added, accumulate=True)
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        handle = block.register_forward_hook(shift)
        try:
            for _ in range(self.steps):
                with torch.enable_grad():
                    loss = model.losses(located.rows).view(edits, -1).mean(1)  # over contexts
                    loss = loss + self.decay * (change.norm(dim=-1, keepdim=True) / norms**2).squeeze(1)
                    (change.grad,) = torch.autograd.grad(loss.sum(), change)
                optimizer.step()
                with torch.no_grad():
                    change *= (self.clamp * norms / change.norm(dim=-1, keepdim=True)).clamp(max=1)
        finally:
            handle.remove()
        return before + change.detach()

    def _spread(self, model: TaskModel, located: Sequence[Located], z: Tensor, change_of: Any) -> dict[str, Delta]:
        """Returns a stack of changes per down-projection, each computed on the model with the changes before it."""
        weights = self._weights(model)
        block = model.model.get_submodule(list(weights)[-1])
        changes: dict[str, Delta] = {}
        for number, name in enumerate(weights.values()):
            keys, states = [], []
            for one in located:
                with edited(model.layers, changes):
                    keys.append(_inputs(model, one, model.layers[name]).mean(1))  # over contexts
                    states.append(_hidden_states(model, one, block)[:, 0])
            K, h = torch.cat(keys).double(), torch.cat(states).double()  # (edits, in), (edits, hidden)
            changes[name] = change_of(model, name, K, (z.double() - h) / (len(weights) - number))
        return changes

    def _single(self, model: TaskModel, name: str, K: Tensor, R: Tensor) -> LowRank:
        """Returns one rank-one change per edit."""
        solved = torch.cholesky_solve(K.mT, cholesky(self.ridge * self._moment(name, model))).mT  # k̃ (edits, in)
        A = solved / (1 + (K * solved).sum(-1, keepdim=True))
        dtype = torch.promote_types(model.model.dtype, torch.float32)
        return LowRank(A[:, None].to(dtype), R[:, None].to(dtype))

    def _joint(self, model: TaskModel, name: str, K: Tensor, R: Tensor) -> Delta:
        """Returns one change for all edits, as a stack with one entry."""
        sums = Sums(K.shape[1])
        sums.add(K, {name: R})
        (change,) = sums.solve(self._moment(name, model), {name: self.ridge}, edits=1).values()
        dtype = torch.promote_types(model.model.dtype, torch.float32)
        return replace(change, **{key: tensor[None].to(dtype) for key, tensor in change.tensors.items()})

    def _moment(self, name: str, model: TaskModel) -> Tensor:
        if self._covariance is None:
            raise InputError("memit needs a sample of ordinary inputs for its covariance; calibrate it on revisions")
        self._covariance.check_fits(model)
        return self._covariance.of(name, model.device)


@torch.no_grad()
def _hidden_states(model: TaskModel, located: Located, block: nn.Module) -> Tensor:
    """Returns the block's output at each row's token: (edits, contexts, hidden)."""
    read: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        read.append(located.at_tokens(output[0] if isinstance(output, tuple) else output))

    handle = block.register_forward_hook(keep)
    try:
        model.losses(located.rows)
    finally:
        handle.remove()
    return read[0].float()


@torch.no_grad()
def _inputs(model: TaskModel, located: Located, layer: nn.Module) -> Tensor:
    """Returns the layer's input at each row's token: (edits, contexts, in)."""
    read: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: read.append(located.at_tokens(args[0])))
    try:
        model.losses(located.rows)
    finally:
        handle.remove()
    return read[0].float()
