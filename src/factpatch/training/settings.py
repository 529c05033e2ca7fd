"""Reads settings from presets, TOML files and `key=value` texts, converted to the types of a dataclass."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from factpatch.errors import InputError
from factpatch.files import read_text


def preset_values(name: str) -> dict[str, Any]:
    return tomllib.loads((files("factpatch.training") / "presets" / f"{name}.toml").read_text())


def read_toml(path: Path, presets: Sequence[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        advice = f"give a TOML file or one of {', '.join(presets)}"
        raise InputError(f"cannot read the config {path} ({error.strerror}); {advice}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a TOML file: {error}; correct it") from None


LARGEST = 1e15  # no setting needs a larger number; some would overflow or never end


def read_settings(settings: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Parses settings such as `editor.width=512` into {"editor": {"width": 512}}; values may be unquoted texts."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            problems.append(f"expected key=value, found {setting!r}")
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        *outer, last = key.strip().split(".")
        table = found
        for name in outer:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                break
        if isinstance(table, dict):
            table[last] = value
        else:
            problems.append(f"{key} is set both as a value and as a table")
    return found


def merged(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines settings; later ones win. A later `steps` also overrides an earlier `minutes`."""
    found: dict[str, Any] = {}
    for values in sources:
        if "steps" in values:
            found.pop("minutes", None)
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = {**found[key], **value} if both else value
    return found


def typed(
    cls: type, values: Mapping[str, Any], problems: list[str], nested: Mapping[str, type], prefix: str = ""
) -> dict[str, Any]:
    """Converts values to the types of a dataclass's fields; `nested` fields are dataclasses of their own.

    Unknown keys and wrong types are left out and added to the problems.
    """
    kinds = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        try:
            if key not in kinds:
                problems.append(f"unknown setting {name}; known settings are {', '.join(kinds)}")
            elif key not in nested:
                found[key] = _converted(kinds[key], value)
            elif isinstance(value, dict):
                found[key] = nested[key](**typed(nested[key], value, problems, {}, f"{name}."))
            else:
                problems.append(f"{name} must be a table, found {value!r}")
        except ValueError as error:
            problems.append(f"{name}={value!r} must be {error}")
        except InputError as error:  # from the nested dataclass's own checks
            problems.append(str(error))
    return found


def _converted(kind: Any, value: Any) -> Any:
    """Converts a value to a field's type. If it does not fit, a ValueError names what was expected.

    TOML has no value for None, so the text "none" stands for it in fields that may be None.
    """
    if isinstance(kind, types.UnionType):
        given = next(k for k in kind.__args__ if k is not type(None))
        return None if value in (None, "none") else _converted(given, value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("below 2**63")
    if isinstance(value, float) and abs(value) > LARGEST:
        raise ValueError(f"at most {LARGEST:g}")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind == tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    raise ValueError(names.get(kind, "a list of texts"))
