"""Checks of a ledger's settings and tensors, so that a damaged or forged file is refused before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from factpatch.covariance import Covariance, checked_readers
from factpatch.errors import FileError
from factpatch.ledger_store import Store
from factpatch.merging import MODES
from factpatch.models import TaskModel
from factpatch.patch import weight_shape

Shape = tuple[int | None, ...]  # None stands for any size


def stored_settings(store: Store, meta: Mapping[str, str]) -> dict[str, Any]:
    """Reads and checks the settings that the ledger was created with."""
    if not {"base", "settings"} <= meta.keys():
        raise FileError(f"{store.path} is a ledger without a model; create it again with factpatch ledger init")
    found = {"refine": 0, **store.parsed(meta["settings"], dict)}
    ridge, covariance = found.get("ridge"), found.get("covariance")
    if (
        found.get("mode") not in MODES
        or not (ridge is None or _is_positive(ridge))
        or type(found["refine"]) is not int
        or found["refine"] < 0
        or (found["refine"] and "others" not in meta)
        or not isinstance(covariance, dict)
        or not covariance.keys() >= {"sample", "count", "readers"}
    ):
        raise store.damaged("its settings are not those of a ledger")
    return found


def stored_covariance(store: Store, base: str, settings: Mapping[str, Any]) -> Covariance:
    known, moments = settings["covariance"], store.covariance()
    try:
        readers = checked_readers(known["readers"], moments)
    except ValueError as error:
        raise store.damaged(error) from error
    return Covariance(base, str(known["sample"]), known["count"], moments, readers)


def stored_ridge(store: Store, text: str) -> dict[str, float]:
    """Reads λ by weight, as an editor has learned it for one fact."""
    found = store.parsed(text, dict)
    if not all(map(_is_positive, found.values())):
        raise store.damaged("a ridge is not a number above 0")
    return found


def stored_others(store: Store, text: str) -> list[str]:
    found = store.parsed(text, list)
    if not all(isinstance(one, str) for one in found):
        raise store.damaged("its control inputs are not text")
    return found


def check_units(store: Store, units: Mapping[str, Tensor], model: TaskModel, covariance: Covariance) -> None:
    widths = _widths(model, covariance)
    expected: dict[str, Shape] = {f"K:{key}": (widths[key],) for key in covariance.readers.values()}
    expected |= {f"V:{name}": (1,) for name in covariance.readers}
    if units.keys() != expected.keys() or not all(bool((unit > 0).all()) for unit in units.values()):
        raise store.damaged("its units are not those of its weights")
    _check(store, units, expected, (torch.float32, torch.float64))


def check_rows(store: Store, rows: Mapping[str, Tensor], model: TaskModel, covariance: Covariance) -> None:
    """Checks the rows of one fact: K (tokens, in) and V (tokens, out), with the same number of tokens."""
    expected = _pairs(model, covariance, None)
    _check(store, rows, expected, (torch.int32,))
    for name in rows:
        key = _key(name, covariance)
        if key not in rows or len(rows[key]) != len(rows[name]):
            raise store.damaged(f"{name} has a different number of tokens than its inputs")


def check_totals(store: Store, totals: Mapping[str, Tensor], model: TaskModel, covariance: Covariance) -> None:
    """Checks the sums over facts: KᵀK (in, in) and KᵀV (in, out)."""
    widths = _widths(model, covariance)
    expected = {
        name: (widths[_key(name, covariance)[2:]], size) for name, (_, size) in _pairs(model, covariance, None).items()
    }
    _check(store, totals, expected, (torch.float64,))


def _widths(model: TaskModel, covariance: Covariance) -> dict[str, int]:
    return {key: weight_shape(model.layers[key])[1] for key in covariance.readers.values()}


def _pairs(model: TaskModel, covariance: Covariance, rows: int | None) -> dict[str, Shape]:
    found: dict[str, Shape] = {f"K:{key}": (rows, width) for key, width in _widths(model, covariance).items()}
    return found | {f"V:{name}": (rows, weight_shape(model.layers[name])[0]) for name in covariance.readers}


def _key(name: str, covariance: Covariance) -> str:
    return name if name.startswith("K:") else f"K:{covariance.readers[name.removeprefix('V:')]}"


def _check(
    store: Store, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], dtypes: tuple[torch.dtype, ...]
) -> None:
    for name, tensor in tensors.items():
        shape = expected.get(name)
        fits = shape is not None and len(shape) == tensor.dim()
        if not fits or any(size not in (None, found) for size, found in zip(shape or (), tensor.shape, strict=True)):
            raise store.damaged(f"{name} has the shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in dtypes or not tensor.isfinite().all():
            raise store.damaged(f"{name} holds values that are not finite numbers")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
