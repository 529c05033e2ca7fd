"""The least-squares solve behind merging: S = Vᵀ K (KᵀK + λ N C)⁻¹ for each weight, from sums of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from factpatch.covariance import Covariance, Example, passes, visit_inputs
from factpatch.deltas import Delta, Dense, LowRank, stack
from factpatch.errors import MismatchError
from factpatch.grouping import keys_by_value
from factpatch.models import TaskModel
from factpatch.patch import Patch, out_by_in, stack_patches, weight_shape

BLOCK = 768  # columns of K per block of KᵀK


@dataclass
class Sums:
    """Sums over the edits' tokens that the solve needs, for the weights that read one input of width `in`.

    Rows are stored while there are fewer than `in`; after that only their products are, so that memory is bounded.
    """

    width: int
    rows: int = 0
    K: list[Tensor] = field(default_factory=list)  # (tokens, in) each
    V: dict[str, list[Tensor]] = field(default_factory=dict)  # (tokens, out) each, by weight
    KK: Tensor | None = None  # KᵀK (in, in)
    KV: dict[str, Tensor] = field(default_factory=dict)  # KᵀV (in, out), by weight

    def add(self, K: Tensor, V: Mapping[str, Tensor]) -> None:
        self.rows += len(K)
        self.K.append(K)
        for name, values in V.items():
            self.V.setdefault(name, []).append(values)
        if sum(map(len, self.K)) >= self.width:
            self.reduce()

    def reduce(self) -> None:
        """Replaces rows by their products."""
        if not self.K:
            return
        K = torch.cat(self.K)
        products = _gram(K)
        self.KK = products if self.KK is None else self.KK.add_(products)
        for name, values in self.V.items():
            products = K.mT @ torch.cat(values)
            self.KV[name] = self.KV[name].add_(products) if name in self.KV else products
        self.K, self.V = [], {}

    def solve(self, C: Tensor, ridges: Mapping[str, float], edits: int) -> dict[str, Delta]:
        """Returns S = Vᵀ K M⁻¹ for each weight, with M = KᵀK + λ N C.

        S comes as factors A = K M⁻¹ and B = V where these are smaller than a dense matrix.
        """
        kept = torch.cat(self.K) if self.KK is None else None  # (tokens, in), if there are few
        values = {name: torch.cat(chunks) for name, chunks in self.V.items()} if self.KK is None else {}
        self.reduce()
        assert self.KK is not None
        solved: dict[str, Delta] = {}
        roots: dict[float, Tensor] = {}  # Cholesky factors of M by λ
        for name, KV in self.KV.items():
            λ = ridges[name]
            if λ not in roots:
                roots[λ] = cholesky(self.KK + λ * edits * C)
            if kept is not None and self.rows * sum(KV.shape) < KV.numel():
                solved[name] = LowRank(torch.cholesky_solve(kept.mT, roots[λ]).mT, values[name])
            else:
                solved[name] = Dense(torch.cholesky_solve(KV, roots[λ]).mT)
        return solved


def _gram(K: Tensor) -> Tensor:
    """Computes KᵀK, each of its off-diagonal blocks only once."""
    blocks = K.split(BLOCK, dim=1)
    product = K.new_empty(K.shape[1], K.shape[1])
    for i, left in enumerate(blocks):
        rows = slice(i * BLOCK, i * BLOCK + left.shape[1])
        for j, right in enumerate(blocks[: i + 1]):
            columns = slice(j * BLOCK, j * BLOCK + right.shape[1])
            product[rows, columns] = left.mT @ right
            if j < i:
                product[columns, rows] = product[rows, columns].mT
    return product


@dataclass(frozen=True)
class Problem:
    """The patches to merge, with one example per edit, and the weights that they change."""

    model: TaskModel
    examples: list[Example]
    owners: list[Patch]  # the patch of each example
    covariance: Covariance
    ridges: Mapping[str, float]
    weights: dict[str, list[str]]  # weights to solve for, by the first one that reads their input, in running order

    @classmethod
    def of(
        cls, model: TaskModel, patches: Sequence[Patch], covariance: Covariance, ridges: Mapping[str, float]
    ) -> Problem:
        changed = {name for patch in patches for name in patch.deltas}
        weights = keys_by_value({name: key for name, key in covariance.readers.items() if name in changed})
        examples = [(edit.x, edit.a) for patch in patches for edit in patch.edits]
        owners = [patch for patch in patches for _ in patch.edits]
        return cls(model, examples, owners, covariance, ridges, weights)

    def shape(self, name: str) -> tuple[int, int]:
        return weight_shape(self.model.layers[name])

    def rows(self, key: str, indices: list[int], X: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns K (tokens, in) and, for each weight that reads it, V (tokens, out)."""
        X = X.double()
        V = {name: self.values(indices, name, X).flatten(0, 1) for name in self.weights[key]}
        return X.flatten(0, 1), V

    def values(self, indices: list[int], name: str, X: Tensor) -> Tensor:
        """Returns X ΔWᵀ, what each example's own patch adds to a layer's output: (examples, tokens, out)."""
        changes = [self.owners[i].deltas.get(name) for i in indices]
        V = X.new_zeros(*X.shape[:-1], self.shape(name)[0])
        factors: list[Delta | None] = [change if isinstance(change, LowRank) else None for change in changes]
        if any(change is not None for change in factors):
            V = stack(factors, self.shape(name), X).add_rows(V, X)
        for i, change in enumerate(changes):
            if isinstance(change, Dense):
                V[i] += X[i] @ change.delta.to(X).mT
        return V

    def solve(self, key: str, sums: Sums) -> dict[str, Delta]:
        return solve_weights(self.model, key, sums, self.covariance, self.ridges, len(self.examples))


def solve_weights(
    model: TaskModel, key: str, sums: Sums, covariance: Covariance, ridges: Mapping[str, float], edits: int
) -> dict[str, Delta]:
    """Returns the merged changes of the weights that read the input of `key`, in the precision of patches."""
    C = covariance.of(key, model.device)
    dtype = torch.float64 if model.model.dtype == torch.float64 else torch.float32
    return {name: _cast(delta, dtype) for name, delta in sums.solve(C, ridges, edits).items()}


def solve_independently(problem: Problem) -> dict[str, Delta]:
    """Solves for each weight on its own, so that a fact's part in the sums does not depend on any other fact."""
    weights = problem.weights
    widths = {key: problem.shape(key)[1] for key in weights}
    sizes = {key: widths[key] * sum(sum(problem.shape(name)) for name in names) for key, names in weights.items()}
    deltas: dict[str, Delta] = {}
    for group in passes(sizes, problem.model.device):
        sums = {key: Sums(widths[key]) for key in group}

        def visit(indices: list[int], key: str, X: Tensor, sums: dict[str, Sums] = sums) -> None:
            sums[key].add(*problem.rows(key, indices, X))

        visit_inputs(problem.model, problem.examples, group, visit)
        for key in group:
            deltas |= problem.solve(key, sums.pop(key))
    return deltas


def solve_in_sequence(problem: Problem) -> dict[str, Delta]:
    """Solves in running order, each weight on the model as merged so far.

    The target of a layer is its output under the edit's own patch, so later layers correct the errors of earlier ones.
    """
    model, weights = problem.model, problem.weights
    tokens = sum(model.lengths([text for text, _ in problem.examples]))
    sizes = {key: tokens * sum(problem.shape(name)[0] for name in names) for key, names in weights.items()}
    deltas: dict[str, Delta] = {}
    merged: dict[str, Delta] = {}  # the same changes as stacks with one entry
    for group in passes(sizes, model.device):
        targets = _own_outputs(problem, group)
        for key in group:
            sums = Sums(problem.shape(key)[1])

            def visit(indices: list[int], key: str, X: Tensor, targets: Targets = targets, sums: Sums = sums) -> None:
                K = X.double().flatten(0, 1)
                outputs = {name: K @ out_by_in(model.layers[name]).double().mT for name in weights[key]}
                sums.add(K, {n: torch.cat([targets[i, n] for i in indices]) - output for n, output in outputs.items()})

            visit_inputs(model, problem.examples, [key], visit, lambda _, merged=merged: merged)
            solved = problem.solve(key, sums)
            deltas |= solved
            merged |= {n: stack([delta], problem.shape(n), model.layers[n].weight) for n, delta in solved.items()}
    return deltas


Targets = dict[tuple[int, str], Tensor]  # (tokens, out) by example and weight


def _own_outputs(problem: Problem, keys: Sequence[str]) -> Targets:
    """Computes the layers' outputs for each example under its own patch."""
    targets: Targets = {}

    def visit(indices: list[int], key: str, X: Tensor) -> None:
        X = X.double()
        for name in problem.weights[key]:
            outputs = X @ out_by_in(problem.model.layers[name]).double().mT + problem.values(indices, name, X)
            targets.update({(i, name): outputs[k] for k, i in enumerate(indices)})

    def own_patches(indices: list[int]) -> dict[str, Delta]:
        return stack_patches([problem.owners[i] for i in indices], problem.model.layers)

    visit_inputs(problem.model, problem.examples, keys, visit, own_patches)
    return targets


def cholesky(M: Tensor) -> Tensor:
    """Returns the lower Cholesky factor of M (..., in, in), or of M plus a tiny multiple of I if M is singular."""
    mean = M.diagonal(dim1=-2, dim2=-1).mean(-1)
    shift = torch.zeros_like(mean)
    root, failed = torch.linalg.cholesky_ex(M)
    for exponent in range(-14, -5, 2):
        if not failed.any():
            break
        shift = torch.where(failed.bool(), 10.0**exponent * mean, shift)
        root, failed = torch.linalg.cholesky_ex(M + shift[..., None, None] * torch.eye(M.shape[-1]).to(M))
    if failed.any() or not root.isfinite().all():
        raise MismatchError("cannot solve the merge with this covariance; compute it again from more inputs")
    return root


def _cast(delta: Delta, dtype: torch.dtype) -> Delta:
    if isinstance(delta, LowRank):
        return LowRank(delta.A.to(dtype), delta.B.to(dtype))
    return Dense(delta.delta.to(dtype).contiguous())
