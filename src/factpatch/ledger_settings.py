"""The settings of a ledger: recorded when it is created, and checked when it is opened, as a file may be damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from factpatch.covariance import Covariance, checked_readers
from factpatch.errors import FileError, MismatchError
from factpatch.ledger_store import Store
from factpatch.ledger_sums import choose_units
from factpatch.merging import MODES
from factpatch.models import TaskModel


def initialise(
    store: Store, model: TaskModel, covariance: Covariance, others: Sequence[str] | None, settings: Mapping[str, Any]
) -> None:
    """Records the model, its covariance and the settings of a new ledger, unless another process was faster."""
    units = choose_units(model, covariance)
    described = {"sample": covariance.sample, "count": covariance.count, "readers": covariance.readers}
    with store.transaction():
        if store.get_meta():
            return
        store.put_covariance(covariance.moments)
        store.put_cached("units", [], units)
        if settings["refine"]:
            store.set_meta({"others": json.dumps(others)})
        identity = {"base": model.fingerprint, "identity": model.identity}
        store.set_meta({**identity, "settings": json.dumps({**settings, "covariance": described})})


def stored_settings(store: Store, meta: Mapping[str, str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the settings that the ledger was created with.

    Raises a MismatchError if they differ from those that are wanted. None stands for any value.
    """
    if not {"base", "settings"} <= meta.keys():
        raise FileError(f"{store.path} is a ledger without a model; create it again with factpatch ledger init")
    settings = {"refine": 0, **store.parsed(meta["settings"], dict)}
    ridge, refine, covariance = settings.get("ridge"), settings["refine"], settings.get("covariance")
    if (
        settings.get("mode") not in MODES
        or not (ridge is None or _is_positive(ridge))
        or type(refine) is not int
        or refine < 0
        or (refine and "others" not in meta)
        or not isinstance(covariance, dict)
        or not covariance.keys() >= {"sample", "count", "readers"}
    ):
        raise store.damaged("its settings are not those of a ledger")
    for name, value in wanted.items():
        if value not in (None, settings[name]):
            raise MismatchError(
                f"the ledger {store.path} was created with {name}={settings[name]}, not {value}; "
                f"leave {name} out, or create another ledger"
            )
    return settings


def stored_covariance(store: Store, base: str, settings: Mapping[str, Any]) -> Covariance:
    described, moments = settings["covariance"], store.covariance()
    try:
        readers = checked_readers(described["readers"], moments)
    except ValueError as error:
        raise store.damaged(error) from error
    return Covariance(base, str(described["sample"]), described["count"], moments, readers)


def stored_ridge(store: Store, text: str) -> dict[str, float]:
    """Reads λ by weight, as an editor has learned it for one fact."""
    ridges = store.parsed(text, dict)
    if not all(map(_is_positive, ridges.values())):
        raise store.damaged("a ridge is not a number above 0")
    return ridges


def stored_others(store: Store, text: str) -> list[str]:
    others = store.parsed(text, list)
    if not all(isinstance(one, str) for one in others):
        raise store.damaged("its control inputs are not text")
    return others


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
