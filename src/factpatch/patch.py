"""Patch: one edit of a model as a small, reversible change of weights.

A patch is a thing of its own: it can be saved, loaded, added to another, applied to a model and taken off again. A
model remembers its original weights while patches are on it, and its weights are always original + patches in order,
computed anew: floating-point addition cannot be undone by subtraction, so taking a patch off recomputes instead, and
gives the same bits as if it had never been there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from factpatch.deltas import Delta, add, from_tensors, stack
from factpatch.errors import FileError, MismatchError
from factpatch.facts import FactEdit
from factpatch.files import atomic_file

FORMAT = "1"


class Patchable(Protocol):
    """What a patch needs of a model: its editable layers by weight name, and the state that patches keep on it."""

    layers: Mapping[str, nn.Module]
    patches: list[Patch]
    originals: dict[str, Tensor]

    @property
    def fingerprint(self) -> str: ...


Model = TypeVar("Model", bound=Patchable)


@dataclass(frozen=True, eq=False)
class Patch:
    deltas: dict[str, Delta]  # by weight name
    base: str  # fingerprint of the weights it was made for
    method: str  # which EditMethod made it
    edits: tuple[FactEdit, ...]  # one, or several after adding

    @property
    def rank(self) -> int:
        return max((delta.rank for delta in self.deltas.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for d in self.deltas.values() for t in d.tensors.values())

    def norm(self) -> float:
        """Frobenius norm of the whole change."""
        squares = [delta.norm() ** 2 for delta in self.deltas.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def __add__(self, other: Patch) -> Patch:
        """Both edits in one patch: applying the sum is applying one after the other."""
        if other.base != self.base:
            raise MismatchError(
                f"patches for different weights cannot be added: {self.base[:12]} and {other.base[:12]}; "
                "make both for the same model"
            )
        deltas = dict(self.deltas)
        for name, delta in other.deltas.items():
            deltas[name] = add(deltas[name], delta) if name in deltas else delta
        methods = dict.fromkeys([*self.method.split("+"), *other.method.split("+")])
        edits = dict.fromkeys([*self.edits, *other.edits])
        return Patch(deltas, self.base, "+".join(methods), tuple(edits))

    # On a model

    def apply(self, model: Model) -> Model:
        """Writes the patch into the model's weights. `revert` takes it off again, in any order."""
        self.check_fits(model)
        _rewrite(model, [*model.patches, self])
        return model

    def revert(self, model: Model) -> Model:
        """Takes this patch off; the weights are then, bit for bit, as if it had never been applied."""
        places = [i for i, patch in enumerate(model.patches) if patch is self]
        if not places:
            raise MismatchError("this patch is not on the model; revert the object that was applied")
        last = places[-1]
        _rewrite(model, model.patches[:last] + model.patches[last + 1 :])
        return model

    @contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """`with patch.applied(model):` applies, and reverts at the end whatever happens."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)

    def check_fits(self, model: Patchable) -> None:
        if self.base != model.fingerprint:
            raise MismatchError(
                f"the patch was made for weights {self.base[:12]}, this model has {model.fingerprint[:12]}; "
                "load the model it was made for, or make the edit anew"
            )
        for name, delta in self.deltas.items():
            expected = weight_shape(model.layers[name]) if name in model.layers else None
            if expected != delta.shape:
                raise MismatchError(f"the patch changes {name} of shape {delta.shape}, the model has {expected} there")

    # In a file

    def save(self, path: str | Path) -> None:
        """One safetensors file with the edit, the base's fingerprint and a checksum in its metadata."""
        tensors = {
            f"{name}:{part}": tensor.detach().cpu().clone().contiguous()
            for name, delta in self.deltas.items()
            for part, tensor in delta.tensors.items()
        }
        metadata = {
            "format": f"factpatch-patch-{FORMAT}",
            "base": self.base,
            "method": self.method,
            "edits": json.dumps([edit.to_dict() for edit in self.edits], ensure_ascii=False),
        }
        metadata["checksum"] = _checksum(metadata, tensors)
        with atomic_file(path) as scratch:
            save_file(tensors, scratch, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> Patch:
        if Path(path).is_dir():
            raise FileError(f"expected a patch file, found a folder at {path}; name the file")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            raise FileError(f"no patch file at {path}; check the path") from None
        except (SafetensorError, OSError) as error:
            raise FileError(f"{path} is no readable patch ({error}); is it a patch, and whole?") from error
        kind = metadata.get("format", "none")
        if kind != f"factpatch-patch-{FORMAT}":
            raise FileError(f"{path}: expected format factpatch-patch-{FORMAT}, found {kind}; is it a patch?")
        if metadata.pop("checksum", None) != _checksum(metadata, tensors):
            raise FileError(f"{path} is damaged: its checksum does not match its content; save the patch again")
        try:
            edits = tuple(FactEdit(**edit) for edit in json.loads(metadata["edits"]))
            return cls(_deltas_from(tensors), metadata["base"], metadata["method"], edits)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is no whole patch ({error}); save the patch again") from error


def _deltas_from(tensors: Mapping[str, Tensor]) -> dict[str, Delta]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, part = key.rsplit(":", 1)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{key} holds something else than finite numbers")
        parts.setdefault(name, {})[part] = tensor
    return {name: from_tensors(found) for name, found in parts.items()}


def stack_patches(patches: Sequence[Patch], layers: Mapping[str, nn.Module]) -> dict[str, Delta]:
    """One patch an edit, as stacks by weight: what `engine.edited` runs many edits with."""
    names = [name for name in layers if any(name in patch.deltas for patch in patches)]
    return {
        name: stack([p.deltas.get(name) for p in patches], weight_shape(layers[name]), _weight(layers[name]))
        for name in names
    }


def weight_shape(layer: nn.Module) -> tuple[int, int]:
    """(out, in), also for GPT-2's Conv1D, which stores its weight the other way round."""
    rows, columns = _weight(layer).shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def fingerprint(layers: Mapping[str, nn.Module]) -> str:
    """sha256 of the editable weights, names and shapes included.

    Half precision widens to float32 without loss, so the same stored weights give the same fingerprint in both.
    """
    digest = hashlib.sha256()
    for name in sorted(layers):
        weight = _weight(layers[name]).detach().float().cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.numpy())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of tensors by name; the order in which they come means nothing."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _rewrite(model: Patchable, patches: list[Patch]) -> None:
    """Makes the weights original + patches in order; on any failure they stay as they were."""
    before = model.patches
    names = _touched([*before, *patches])
    try:
        _write_weights(model, names, patches)
        model.patches = patches
    except BaseException:
        _write_weights(model, names, before)
        raise
    finally:
        for name in set(model.originals) - _touched(model.patches):
            del model.originals[name]


@torch.no_grad()
def _write_weights(model: Patchable, names: Iterable[str], patches: list[Patch]) -> None:
    for name in names:
        layer = model.layers[name]
        weight = _weight(layer)
        original = model.originals.setdefault(name, weight.detach().clone())
        changes = [patch.deltas[name].dense().to(weight.device) for patch in patches if name in patch.deltas]
        if not changes:
            weight.copy_(original)
            continue
        total = original.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for change in changes:
            total += change if isinstance(layer, nn.Linear) else change.mT
        weight.copy_(total)


def _touched(patches: list[Patch]) -> set[str]:
    return {name for patch in patches for name in patch.deltas}


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
