"""The least-squares form of an update: the same effect at the edit's own tokens, and as little as possible elsewhere.

For one weight, let K (tokens × in) hold the layer's inputs at the edit's tokens, V = K ΔWᵀ what the update adds to its
outputs there, and C the mean of k kᵀ over the layer's inputs for other texts. With the ridge λ, the update becomes

    S = argmin Σ ‖S k − v‖² + λ tr(S C Sᵀ) = Bᵀ A,    A = K (λ C)⁻¹,    B = (A Kᵀ + I)⁻¹ V

This is the merge of a single patch (merging.py), computed for a batch of edits. It is differentiable in ΔW.

With a shrinkage γ, C is replaced by C + γ mean(diag C) I. Without it, the update takes effect mainly along directions
in which inputs hardly vary, and paraphrases differ from x in many of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from factpatch.covariance import Covariance, check_ridge
from factpatch.deltas import Delta, LowRank, aligned
from factpatch.engine import Trace
from factpatch.errors import InputError
from factpatch.grouping import keys_by_value
from factpatch.models import Causal, Rows, TaskModel
from factpatch.models.rows import NO_TARGET

SHRINKAGE = 0.1


class LeastSquares(nn.Module):
    """Turns updates into their least-squares form. Weights that read the same input share one stored (λ C)⁻¹."""

    def __init__(self, readers: Mapping[str, str], shapes: Mapping[str, tuple[int, int]], ridge: float):
        """`readers` maps each weight of `shapes` to the first one that reads the same input."""
        super().__init__()
        check_ridge(ridge)
        self.ridge = ridge
        self.readers = {name: key for name, key in readers.items() if name in shapes}
        self.weights = keys_by_value(self.readers)  # by the first weight that reads the same input
        for number, names in enumerate(self.weights.values()):
            width = shapes[names[0]][1]
            self.register_buffer(f"inverse_{number}", torch.zeros(width, width))

    @classmethod
    def fitted(
        cls,
        covariance: Covariance,
        shapes: Mapping[str, tuple[int, int]],
        ridge: float,
        shrinkage: float,
        device: torch.device,
    ) -> Self:
        """Creates the module for the covariance of ordinary inputs, with the shrinkage γ."""
        if not 0 <= shrinkage < float("inf"):
            raise InputError(f"expected a shrinkage of at least 0, found {shrinkage}")
        solver = cls(covariance.readers, shapes, ridge).to(device)
        for key, inverse in zip(solver.weights, solver.buffers(), strict=True):
            C = covariance.of(key, device)
            C.diagonal().add_(shrinkage * C.diagonal().mean())
            inverse.copy_(torch.linalg.inv(ridge * C))
        return solver

    def forward(
        self, deltas: Mapping[str, Delta], traces: Mapping[str, Trace], real: Sequence[Tensor]
    ) -> dict[str, Delta]:
        """Returns the changes in least-squares form. `real` holds the masks that `real_tokens` returns.

        A weight whose layer did not run, or does not read the tokens of the texts, keeps its update.
        """
        masks = {mask.shape[1]: mask.unsqueeze(-1) for mask in real}  # (edits, tokens, 1), by the number of tokens
        solved = dict(deltas)
        for names, inverse in zip(self.weights.values(), self.buffers(), strict=True):
            traced = [name for name in names if name in deltas and traces[name].X.shape[1] in masks]
            if not traced:
                continue
            X = traces[traced[0]].X
            with torch.no_grad():
                K = X.to(_precise(X)) * masks[X.shape[1]]  # (edits, tokens, in); without padding
                A = K @ inverse.to(K.dtype)
                P = _inverse((A @ K.mT).double())  # (edits, tokens, tokens)
            factor = _padded(A, X)
            for name in traced:
                delta = deltas[name]
                V = delta.add_rows(K.new_zeros(*K.shape[:2], delta.shape[0]).float(), K.float())  # (edits, tokens, out)
                solved[name] = LowRank(factor, _padded(P.float() @ V, X))
        return solved


def _precise(X: Tensor) -> torch.dtype:
    """Returns the dtype of the products. In float32, the change has errors of up to 3e-4, far less than those of bf16.

    On a GPU, products of float32 may have only ten bits, and those of float64 take hardly longer.
    """
    return torch.float32 if X.dtype == torch.bfloat16 and X.device.type == "cpu" else torch.float64


def _inverse(products: Tensor) -> Tensor:
    """Computes (A Kᵀ + I)⁻¹, which is symmetric and positive definite, without waiting for the device."""
    eye = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    root, _ = torch.linalg.cholesky_ex(products + eye)
    inverse = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
    return inverse.mT @ inverse


def _padded(factor: Tensor, like: Tensor) -> Tensor:
    """Returns a factor in the model's dtype, with zero rows added to get an aligned rank."""
    return F.pad(factor, (0, 0, 0, aligned(factor.shape[1], like) - factor.shape[1])).to(like.dtype)


def with_distinct_widths(rows: Rows) -> Rows:
    """Pads the answers by one token if they are as wide as the inputs: layers are told apart by the width they read."""
    labels = rows.labels
    if labels is None or labels.dim() == 1 or labels.shape[1] != rows.inputs["input_ids"].shape[1]:
        return rows
    return Rows(rows.inputs, F.pad(labels, (0, 1), value=NO_TARGET))


def real_tokens(model: TaskModel, rows: Rows) -> list[Tensor]:
    """Returns masks of the tokens that are not padding, one per text that layers read: (edits, tokens) each."""
    if isinstance(model, Causal):  # reads prompt and answer as one text
        return [model.joint_inputs(rows)["attention_mask"].bool()]
    masks = [rows.inputs["attention_mask"].bool()]
    if rows.labels is not None and rows.labels.dim() > 1:
        masks.append(rows.labels.ne(NO_TARGET))
    return masks
