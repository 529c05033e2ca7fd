"""Patch: a small, reversible change of a model's weights that carries out one or more edits.

A patch can be saved, loaded, added to another patch, applied to a model and reverted. While patches are applied, the
model also keeps a copy of its original weights. Its weights are always recomputed as the originals plus all patches in
order: subtracting a patch would leave rounding errors, whereas recomputing gives exactly the same bits as if the patch
had never been applied.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from factpatch import hub
from factpatch.deltas import Delta, add, from_tensors, stack
from factpatch.errors import FileError, MismatchError
from factpatch.export import Adapter
from factpatch.facts import FactEdit
from factpatch.files import atomic_file, read_safetensors, sort_metadata

FORMAT = "factpatch-patch-1"
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Patchable(Protocol):
    """The parts of a model that a patch uses."""

    model: nn.Module
    layers: Mapping[str, nn.Module]  # editable layers by weight name
    patches: list[Patch]  # currently applied, in order
    originals: dict[str, Tensor]  # unpatched weights of the layers that these patches change
    lock: AbstractContextManager[Any]  # held by the thread that uses the model

    @property
    def fingerprint(self) -> str: ...


Model = TypeVar("Model", bound=Patchable)


@dataclass(frozen=True, eq=False, repr=False)
class Patch:
    """Changes to some of a model's weights. Patches with the same content are equal."""

    deltas: dict[str, Delta]  # by weight name
    base: str  # fingerprint of the model that the patch was made for: its weights and the template of its prompts
    method: str  # name of the EditMethod that made it
    edits: tuple[FactEdit, ...]  # one, or several in a sum of patches
    ridge: dict[str, float] = field(default_factory=dict)  # λ by weight, if the method has learned it for merging

    @property
    def rank(self) -> int:
        """The largest rank among the changes of single weights."""
        return max((delta.rank for delta in self.deltas.values()), default=0)

    @property
    def template(self) -> str | None:
        """The template of the prompts that a decoder's patch was made with, if any."""
        return split_base(self.base)[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for d in self.deltas.values() for t in d.tensors.values())

    def norm(self) -> float:
        """Frobenius norm of the whole change."""
        squares = [delta.norm() ** 2 for delta in self.deltas.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def __repr__(self) -> str:
        first = f", first {self.edits[0].x[:60]!r}" if self.edits else ""
        return (
            f"Patch({len(self.edits)} edit{'s' * (len(self.edits) != 1)}{first}, rank {self.rank}, "
            f"{self.nbytes:,} bytes, base {self.base[:12]})"
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Patch) and self._checksum == other._checksum)

    def __hash__(self) -> int:
        return hash(self._checksum)

    def __add__(self, other: Patch) -> Patch:
        """Returns a patch with the edits of both. Applying it is the same as applying one after the other."""
        if other.base != self.base:
            raise MismatchError(
                f"cannot add patches made for different weights, {self.base[:12]} and {other.base[:12]}; "
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
        """Adds the patch to the model's weights. Applied patches can be reverted in any order."""
        with model.lock:
            self.check_fits(model)
            set_patches(model, [*model.patches, self])
        return model

    def revert(self, model: Model) -> Model:
        """Removes the patch; the weights are then bit for bit as if it had never been applied."""
        with model.lock:
            applied = [i for i, patch in enumerate(model.patches) if patch == self]
            if not applied:
                raise MismatchError("this patch is not applied to the model, so it cannot be reverted")
            last = applied[-1]
            set_patches(model, model.patches[:last] + model.patches[last + 1 :])
        return model

    @contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """Applies the patch for the duration of a `with` block and reverts it afterwards, also after an error.

        Other threads that use the model wait until the block ends.
        """
        with model.lock:
            self.apply(model)
            try:
                yield model
            finally:
                self.revert(model)

    def check_fits(self, model: Patchable) -> None:
        """Raises a MismatchError if the patch was made for another model."""
        check_template("the patch", self.base, model.fingerprint)
        if self.base != model.fingerprint:
            raise MismatchError(
                f"the patch was made for weights {self.base[:12]}, but this model has {model.fingerprint[:12]}; "
                "load the model it was made for, or make the edit again for this one"
            )
        for name, delta in self.deltas.items():
            expected = weight_shape(model.layers[name]) if name in model.layers else None
            if expected != delta.shape:
                raise MismatchError(
                    f"the patch changes {name} of shape {delta.shape}, but the model's shape is {expected}; "
                    "make the edit again for this model"
                )

    # In a file

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file with the edits, the base's fingerprint and a checksum in its metadata."""
        with atomic_file(path) as scratch:
            save_file(self.tensors(), scratch, metadata={**self._metadata(), "checksum": self._checksum})
            sort_metadata(scratch)

    def tensors(self) -> dict[str, Tensor]:
        """Copies all tensors to the CPU, and returns them by the names that they have in a file."""
        return {
            f"{name}:{part}": tensor.detach().cpu().clone().contiguous()
            for name, delta in self.deltas.items()
            for part, tensor in delta.tensors.items()
        }

    def _metadata(self) -> dict[str, str]:
        edits = json.dumps([edit.to_dict() for edit in self.edits], ensure_ascii=False)
        ridge = {"ridge": json.dumps(self.ridge)} if self.ridge else {}
        return {"format": FORMAT, "base": self.base, "method": self.method, "edits": edits, **ridge}

    @cached_property
    def _checksum(self) -> str:
        return checksum(self._metadata(), self.tensors())

    def export_peft(self, folder: str | Path, rank: int | None = None, model: Patchable | None = None) -> Adapter:
        """Writes the patch as a LoRA adapter, which PEFT, vLLM and llama.cpp can load.

        By default the adapter is exact. A lower `rank` makes it smaller, and `kept` of the returned adapter is the
        share of the change that remains. With the `model`, the adapter also records the model's name and task.
        """
        if model is not None:
            self.check_fits(model)
        adapter = Adapter.of(self.deltas, rank)
        adapter.save(folder, model.model if model is not None else None)
        return adapter

    @classmethod
    def load(cls, path: str | Path) -> Patch:
        """Reads a patch from a file or from the hub (hub:ada/facts). Raises a FileError for a damaged file."""
        path = hub.locate(path, hub.PATCH)
        if os.path.isfile(path / hub.PATCH):  # the folder of a shared patch
            path /= hub.PATCH
        metadata, tensors = read_safetensors(path, "patch", FORMAT)
        if metadata.pop("checksum", None) != checksum(metadata, tensors):
            raise FileError(f"{path} is damaged: its checksum does not match its content; make the patch again")
        try:
            edits = tuple(map(FactEdit.from_dict, json.loads(metadata["edits"])))
            ridge = {name: float(value) for name, value in json.loads(metadata.get("ridge", "{}")).items()}
            if not all(map(math.isfinite, ridge.values())):
                raise ValueError("its ridge is not finite")
            for key, tensor in tensors.items():
                if tensor.dtype not in PRECISIONS or not tensor.isfinite().all():
                    raise ValueError(f"{key} holds values that are not finite numbers")
            return cls(deltas_from(tensors), metadata["base"], metadata["method"], edits, ridge)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FileError(f"{path} does not hold a complete patch ({error}); make the patch again") from error


def deltas_from(tensors: Mapping[str, Tensor]) -> dict[str, Delta]:
    """Groups tensors into one change per weight: the inverse of `Patch.tensors`."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, part = key.rsplit(":", 1)
        parts.setdefault(name, {})[part] = tensor
    return {name: from_tensors(found) for name, found in parts.items()}


def stack_patches(patches: Sequence[Patch], layers: Mapping[str, nn.Module]) -> dict[str, Delta]:
    """Returns one stack of changes per weight, with one entry per patch, as `engine.edited` needs them."""
    names = [name for name in layers if any(name in patch.deltas for patch in patches)]
    return {
        name: stack([p.deltas.get(name) for p in patches], weight_shape(layers[name]), _weight(layers[name]))
        for name in names
    }


def weight_shape(layer: nn.Module) -> tuple[int, int]:
    """Returns the shape (out, in) of a layer's weight, also for GPT-2's Conv1D, which stores its weight transposed."""
    rows, columns = _weight(layer).shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def join_base(weights: str, template: str | None) -> str:
    """Makes a fingerprint from the hash of a model's weights and, after a slash, the template of its prompts."""
    return weights if template is None else f"{weights}/{template}"


def split_base(base: str) -> tuple[str, str | None]:
    """Splits a fingerprint into the hash of the weights and the template: the inverse of `join_base`."""
    weights, slash, template = base.partition("/")
    return weights, template if slash else None


def check_template(what: str, base: str, fingerprint: str) -> None:
    """Raises a MismatchError if two fingerprints differ only in the template."""
    (weights, template), (own_weights, own_template) = split_base(base), split_base(fingerprint)
    if weights == own_weights and template != own_template:
        raise MismatchError(
            f"{what} was made with the template {template or 'none'!r}, this model is used with "
            f"{own_template or 'none'!r}; give the same --template"
        )


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of weights with their names and shapes, the same in every precision that is lossless.

    Weights are hashed in float32, to which half precision widens exactly.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().float().cpu().reshape(-1).numpy())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of tensors with their names, in any order. Unlike in `hash_weights`, precision matters."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def set_patches(model: Patchable, patches: list[Patch]) -> None:
    """Sets the weights to the originals plus these patches in order. If that fails, the weights stay as they were."""
    before = model.patches
    names = _changed([*before, *patches])
    extends = len(patches) > len(before) and all(a is b for a, b in zip(before, patches, strict=False))
    try:
        if extends:
            _write_weights(model, _changed(patches[len(before) :]), patches, done=len(before))
        else:
            _write_weights(model, names, patches)
        model.patches = patches
    except BaseException:
        _write_weights(model, names, before)
        raise
    finally:
        for name in set(model.originals) - _changed(model.patches):
            del model.originals[name]


@torch.no_grad()
def _write_weights(model: Patchable, names: Iterable[str], patches: list[Patch], done: int = 0) -> None:
    """Sets the weights with these names. The first `done` patches are part of the current weights already."""
    for name in names:
        layer = model.layers[name]
        weight = _weight(layer)
        if name not in model.originals:
            model.originals[name] = weight.detach().clone()
        # The model may have been moved to another device or precision since the original was copied.
        kept = model.originals[name]
        moved = (kept.dtype, kept.device) != (weight.dtype, weight.device)
        original = model.originals[name] = kept.to(weight)
        # Adding to a weight that is stored without rounding gives the same bits as adding all changes again.
        exact = not moved and weight.dtype in (torch.float32, torch.float64)
        start, more = (weight, patches[done:]) if exact and done else (original, patches)
        changes = [patch.deltas[name].dense().to(weight.device) for patch in more if name in patch.deltas]
        if not changes:
            weight.copy_(original)
            continue
        total = start.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for change in changes:
            total += change if isinstance(layer, nn.Linear) else change.mT
        weight.copy_(total)
        if not weight.is_meta and not weight.isfinite().all():
            raise MismatchError(f"the patch is too large: {name} would not be finite; make the patch again")


def _changed(patches: list[Patch]) -> set[str]:
    return {name for patch in patches for name in patch.deltas}


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of everything in a patch file."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
