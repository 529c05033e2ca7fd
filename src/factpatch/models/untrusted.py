"""Checks of a model's folder before transformers reads it: everything that is read must lie in the folder."""

from __future__ import annotations

import json
from pathlib import Path

from factpatch.errors import ModelError
from factpatch.files import read_text, refuse_device

ADAPTER = "adapter_config.json"


def check_folder(folder: Path) -> None:
    """Raises a ModelError if files of the folder lead to other places, or are devices or pipes."""
    for path in folder.iterdir():
        refuse_device(path)
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder} holds a PEFT adapter, whose {ADAPTER} names another model; merge it into that model first"
        )
    for index in folder.glob("*.index.json"):
        try:
            files = set(json.loads(read_text(index))["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index} is not a readable list of weight files ({error})") from error
        if outside := [file for file in files if not isinstance(file, str) or Path(file).name != file]:
            raise ModelError(f"{index} names {outside[0]!r}, which is not a file in its folder; it is not read")
