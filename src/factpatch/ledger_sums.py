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
from factpatch.models import TaskModel
from factpatch.patch import Patch, weight_shape
from factpatch.solving import Problem, Sums, out_by_in, solve_weights

KEY_STEPS, VALUE_STEPS = 2.0**16, 2.0**17  # units in the root mean square of an input, or of an output
EXACT = 2.0**53  # float64 represents all whole numbers up to this one
FACTS_PER_BATCH = 32  # facts whose rows are in memory together

Rows = dict[str, Tensor]  # "K:key" (tokens, in) and "V:weight" (tokens, out), in whole units
Units = Mapping[str, Tensor]  # the same keys: the size of a unit, a power of two
Totals = dict[str, Tensor]  # "K:key" KᵀK (in, in) and "V:weight" KᵀV (in, out), in whole units


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


def quantized_rows(model: TaskModel, patch: Patch, covariance: Covariance, units: Units) -> Rows:
    """Computes the rows of one fact's patch, rounded to whole units, independently of other facts."""
    problem = Problem.of(model, [patch], covariance, {})
    found: dict[str, list[Tensor]] = {}

    def visit(indices: list[int], key: str, X: Tensor) -> None:
        K, V = problem.rows(key, indices, X)
        for name, rows in {f"K:{key}": K, **{f"V:{name}": values for name, values in V.items()}}.items():
            found.setdefault(name, []).append(_whole(rows.cpu() / units[name]))

    visit_inputs(model, problem.examples, problem.weights, visit)
    return {name: torch.cat(rows) for name, rows in found.items()}


def _whole(rows: Tensor) -> Tensor:
    rounded = rows.round()
    if not bool(rounded.abs().max() < 2**31 - 1):
        raise InputError("the patch's changes are too large to merge with others; make the edit again")
    return rounded.to(torch.int32)


def add_to_totals(totals: Totals, facts: Iterable[Rows], readers: Mapping[str, str], sign: int) -> None:
    """Adds the facts' products to the totals, or subtracts them if `sign` is -1."""
    remaining = iter(facts)
    while part := list(islice(remaining, FACTS_PER_BATCH)):
        for name in dict.fromkeys(name for rows in part for name in rows):
            own = [rows for rows in part if name in rows]
            key = name if name.startswith("K:") else f"K:{readers[name.removeprefix('V:')]}"
            K, right = (torch.cat([rows[n] for rows in own]).double() for n in (key, name))
            product = sign * (K.mT @ right)
            totals[name] = totals[name].add_(product) if name in totals else product
            if float(totals[name].abs().max()) >= EXACT:
                raise InputError("the ledger holds too many facts to sum exactly; start another one")


def solve_rows(
    model: TaskModel, facts: Sequence[Rows], units: Units, covariance: Covariance, ridge: Mapping[str, float]
) -> dict[str, Delta]:
    """Computes the merge of a few facts, as factors where these are small."""
    by_key = _by_key(covariance, {name for rows in facts for name in rows})
    deltas: dict[str, Delta] = {}
    for key, names in by_key.items():
        sums = Sums(covariance.moments[key].shape[0])
        for rows in facts:
            K = (rows[f"K:{key}"].double() * units[f"K:{key}"]).to(model.device)
            V = {name: K.new_zeros(len(K), weight_shape(model.layers[name])[0]) for name in names}
            for name in names:
                if f"V:{name}" in rows:
                    V[name] = (rows[f"V:{name}"].double() * units[f"V:{name}"]).to(model.device)
            sums.add(K, V)
        deltas |= solve_weights(model, key, sums, covariance, ridge, len(facts))
    return deltas


def solve_totals(
    model: TaskModel, totals: Totals, facts: int, units: Units, covariance: Covariance, ridge: Mapping[str, float]
) -> dict[str, Delta]:
    """Computes the merge of all facts in the totals."""
    deltas: dict[str, Delta] = {}
    for key, names in _by_key(covariance, totals).items():
        unit = units[f"K:{key}"]
        sums = Sums(len(unit), KK=(totals[f"K:{key}"] * unit * unit[:, None]).to(model.device))
        for name in names:
            sums.KV[name] = (totals[f"V:{name}"] * unit[:, None] * units[f"V:{name}"]).to(model.device)
        deltas |= solve_weights(model, key, sums, covariance, ridge, facts)
    return deltas


def _by_key(covariance: Covariance, names: Container[str]) -> dict[str, list[str]]:
    """Groups the weights among the names by the first weight that reads the same input."""
    found: dict[str, list[str]] = {}
    for name, key in covariance.readers.items():
        if f"V:{name}" in names:
            found.setdefault(key, []).append(name)
    return found
