"""Sums over facts that do not depend on the order in which facts are added and removed.

A fact's part in a merge is KᵀK and KᵀV of its own tokens. Floating-point sums of such parts depend on their order, and
subtracting a part leaves rounding errors behind. So the rows of K and V are first rounded to whole multiples of a unit,
whose products and sums float64 represents exactly. Removing a fact from such a sum gives, bit for bit, the sum that
never contained it, and takes no longer with many facts than with few.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from factpatch.covariance import Covariance, visit_inputs
from factpatch.deltas import Delta
from factpatch.errors import InputError
from factpatch.grouping import keys_by_value
from factpatch.ledger_store import Store
from factpatch.models import TaskModel
from factpatch.patch import Patch, out_by_in, weight_shape
from factpatch.solving import Problem, Sums, solve_weights

KEY_STEPS, VALUE_STEPS = 2.0**16, 2.0**17  # units in the root mean square of an input, or of an output
EXACT = 2.0**53  # float64 represents all whole numbers up to this one
FACTS_PER_BATCH = 32  # facts whose rows are in memory together
FEW = 16  # up to this many facts, the merge is solved from their rows, which may give small factors

Rows = dict[str, Tensor]  # "K:key" (tokens, in) and "V:weight" (tokens, out), in whole units
Totals = dict[str, Tensor]  # "K:key" KᵀK (in, in) and "V:weight" KᵀV (in, out), in whole units
Shapes = Mapping[str, tuple[int, ...]]


def choose_units(model: TaskModel, covariance: Covariance) -> dict[str, Tensor]:
    """Chooses the unit of each dimension of K and of each weight's V.

    It is a small fraction of the root mean square of the inputs or outputs, rounded down to a power of two.
    """
    units: dict[str, Tensor] = {}
    for key, C in covariance.moments.items():
        square = C.diagonal().double()
        units[f"K:{key}"] = _power_of_two(square.clamp(min=1e-6 * float(square.mean()) or 1.0).sqrt() / KEY_STEPS)
    for name, key in covariance.readers.items():
        W, C = out_by_in(model.layers[name]).double().cpu(), covariance.moments[key].double()
        output = ((W @ C) * W).sum(1).mean().clamp(min=0).sqrt()
        units[f"V:{name}"] = _power_of_two((output if output > 0 else torch.ones_like(output))[None] / VALUE_STEPS)
    return units


def _power_of_two(values: Tensor) -> Tensor:
    return torch.exp2(values.log2().floor())


class FactSums:
    """The sums over the facts of a ledger. What is read from its file is checked, as the file may be damaged."""

    def __init__(self, store: Store, model: TaskModel, covariance: Covariance):
        self.store, self.model, self.covariance = store, model, covariance
        self.widths = {key: weight_shape(model.layers[key])[1] for key in covariance.readers.values()}
        _, self.units = store.cached("units") or ([], {})
        shapes: Shapes = {f"K:{key}": (width,) for key, width in self.widths.items()}
        shapes = {**shapes, **{f"V:{name}": (1,) for name in covariance.readers}}
        if self.units.keys() != shapes.keys() or not all(bool((unit > 0).all()) for unit in self.units.values()):
            raise store.damaged("its units are not those of its weights")
        self._check(self.units, shapes, torch.float32, torch.float64)

    def quantized_rows(self, patch: Patch) -> Rows:
        """Computes the rows of one fact's patch, rounded to whole units, independently of other facts."""
        problem = Problem.of(self.model, [patch], self.covariance, {})
        chunks: dict[str, list[Tensor]] = {}

        def visit(indices: list[int], key: str, X: Tensor) -> None:
            K, V = problem.rows(key, indices, X)
            for name, rows in {f"K:{key}": K, **{f"V:{name}": values for name, values in V.items()}}.items():
                chunks.setdefault(name, []).append(_whole(rows.cpu() / self.units[name]))

        visit_inputs(self.model, problem.examples, problem.weights, visit)
        return {name: torch.cat(rows) for name, rows in chunks.items()}

    def solve(self, ids: Sequence[int], ridge: Mapping[str, float]) -> tuple[dict[str, Delta], Totals | None]:
        """Merges these facts, and returns the totals that the solve used, if any."""
        if len(ids) <= FEW:
            return self._solve_rows([self._rows(i) for i in ids], ridge), None
        totals = self._totals(ids)
        return self._solve_totals(totals, len(ids), ridge), totals

    def _solve_rows(self, facts: Sequence[Rows], ridge: Mapping[str, float]) -> dict[str, Delta]:
        """Computes the merge of a few facts, as factors where these are small."""
        deltas: dict[str, Delta] = {}
        for key, names in self._weights_by_input({name for rows in facts for name in rows}).items():
            sums = Sums(self.widths[key])
            for rows in facts:
                K = self._scaled(rows, f"K:{key}")
                V = {name: K.new_zeros(len(K), weight_shape(self.model.layers[name])[0]) for name in names}
                sums.add(K, V | {name: self._scaled(rows, f"V:{name}") for name in names if f"V:{name}" in rows})
            deltas |= solve_weights(self.model, key, sums, self.covariance, ridge, len(facts))
        return deltas

    def _scaled(self, rows: Rows, name: str) -> Tensor:
        return (rows[name].double() * self.units[name]).to(self.model.device)

    def _solve_totals(self, totals: Totals, facts: int, ridge: Mapping[str, float]) -> dict[str, Delta]:
        deltas: dict[str, Delta] = {}
        for key, names in self._weights_by_input(totals).items():
            unit = self.units[f"K:{key}"]
            sums = Sums(len(unit), KK=(totals[f"K:{key}"] * unit * unit[:, None]).to(self.model.device))
            for name in names:
                KV = totals[f"V:{name}"] * unit[:, None] * self.units[f"V:{name}"]
                sums.KV[name] = KV.to(self.model.device)
            deltas |= solve_weights(self.model, key, sums, self.covariance, ridge, facts)
        return deltas

    def _weights_by_input(self, names: Container[str]) -> dict[str, list[str]]:
        """Groups the weights among these names by the first weight that reads the same input."""
        return keys_by_value({name: key for name, key in self.covariance.readers.items() if f"V:{name}" in names})

    def _totals(self, ids: Sequence[int]) -> Totals:
        """Computes the sums over facts, from the cached sums if few facts have been added or removed since."""
        before, totals = self.store.cached("totals") or ([], {})
        self._check(totals, self._shapes({key: (width,) for key, width in self.widths.items()}), torch.float64)
        gone, new = set(before) - set(ids), set(ids) - set(before)
        if len(gone) + len(new) > len(ids):
            totals, gone, new = {}, set(), set(ids)
        self._add(totals, map(self._rows, sorted(gone)), -1)
        self._add(totals, map(self._rows, sorted(new)), 1)
        return totals

    def _add(self, totals: Totals, facts: Iterable[Rows], sign: int) -> None:
        """Adds the facts' products to the totals, or subtracts them if `sign` is -1."""
        remaining = iter(facts)
        while batch := list(islice(remaining, FACTS_PER_BATCH)):
            for name in dict.fromkeys(name for rows in batch for name in rows):
                having = [rows for rows in batch if name in rows]
                key = name if name.startswith("K:") else f"K:{self.covariance.readers[name.removeprefix('V:')]}"
                K, right = (torch.cat([rows[n] for rows in having]).double() for n in (key, name))
                product = sign * (K.mT @ right)
                totals[name] = totals[name].add_(product) if name in totals else product
                if float(totals[name].abs().max()) >= EXACT:
                    raise InputError("the ledger holds too many facts to sum exactly; start another one")

    def _rows(self, fact_id: int) -> Rows:
        rows = self.store.rows(fact_id)
        tokens = {key: rows[f"K:{key}"].shape[:1] if f"K:{key}" in rows else (-1,) for key in self.widths}
        self._check(rows, self._shapes(tokens), torch.int32)
        return rows

    def _shapes(self, first: Shapes) -> Shapes:
        """Returns the shapes of "K:key" and "V:weight", whose first dimension is given for each key."""
        shapes = {f"K:{key}": (*first[key], width) for key, width in self.widths.items()}
        for name, key in self.covariance.readers.items():
            shapes[f"V:{name}"] = (*first[key], weight_shape(self.model.layers[name])[0])
        return shapes

    def _check(self, tensors: Mapping[str, Tensor], shapes: Shapes, *dtypes: torch.dtype) -> None:
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes.get(name):
                raise self.store.damaged(f"{name} has the shape {tuple(tensor.shape)}, not {shapes.get(name)}")
            if tensor.dtype not in dtypes or not tensor.isfinite().all():
                raise self.store.damaged(f"{name} holds values that are not finite numbers")


def _whole(rows: Tensor) -> Tensor:
    rounded = rows.round()
    if not bool(rounded.abs().max() < 2**31 - 1):
        raise InputError("the patch's changes are too large to merge with others; make the edit again")
    return rounded.to(torch.int32)
