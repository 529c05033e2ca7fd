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
from torch import Tensor, nn

from factpatch import hub
from factpatch.deltas import Delta, add, from_tensors, stack
from factpatch.errors import FileError, MismatchError
from factpatch.export import Adapter
from factpatch.facts import FactEdit
from factpatch.files import read_safetensors, write_safetensors
from factpatch.fingerprints import check_base, split_base

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
        return sum(t.nbytes for d in self.deltas.values() for t in d.tensors.values())

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
        return self is other or (isinstance(other, Patch) and self.content_hash == other.content_hash)

    def __hash__(self) -> int:
        return hash(self.content_hash)

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
        advice = "load the model it was made for, or make the edit again for this one"
        check_base("the patch was made", self.base, model.fingerprint, advice)
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
        write_safetensors(path, self.tensors(), {**self._metadata(), "checksum": self.content_hash})

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
    def content_hash(self) -> str:
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
            if not all(0 < value < math.inf for value in ridge.values()):
                raise ValueError("its ridge is not a number above 0")
            for key, tensor in tensors.items():
                if tensor.dtype not in PRECISIONS or not tensor.isfinite().all():
                    raise ValueError(f"{key} holds values that are not finite numbers")
            return cls(deltas_from(tensors), metadata["base"], metadata["method"], edits, ridge)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FileError(f"{path} does not hold a complete patch ({error}); make the patch again") from error


def deltas_from(tensors: Mapping[str, Tensor]) -> dict[str, Delta]:
    """Groups tensors into one change per weight: the inverse of `Patch.tensors`."""
    by_weight: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, part = key.rsplit(":", 1)
        by_weight.setdefault(name, {})[part] = tensor
    return {name: from_tensors(parts) for name, parts in by_weight.items()}


def stack_patches(patches: Sequence[Patch], layers: Mapping[str, nn.Module]) -> dict[str, Delta]:
    """Returns one stack of changes per weight, with one entry per patch, as `engine.edited` needs them."""
    names = [name for name in layers if any(name in patch.deltas for patch in patches)]
    return {
        name: stack([p.deltas.get(name) for p in patches], weight_shape(layers[name]), layers[name].weight)
        for name in names
    }


def out_by_in(layer: nn.Module) -> Tensor:
    """Returns a layer's weight as (out, in), also for GPT-2's Conv1D, which stores it transposed."""
    weight: Any = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.mT


def weight_shape(layer: nn.Module) -> tuple[int, int]:
    """Returns the shape (out, in) of a layer's weight."""
    out, in_ = out_by_in(layer).shape
    return out, in_


@contextmanager
def unpatched(model: Patchable) -> Iterator[None]:
    """Reverts all patches of the model for a `with` block and applies them again afterwards."""
    with model.lock:
        applied = model.patches
        set_patches(model, [])
        try:
            yield
        finally:
            set_patches(model, applied)


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
        weight: Any = layer.weight
        if name not in model.originals:
            model.originals[name] = weight.detach().clone()
        # The model may have been moved to another device or precision since the original was copied.
        copied = model.originals[name]
        moved = (copied.dtype, copied.device) != (weight.dtype, weight.device)
        original = model.originals[name] = copied.to(weight)
        # Adding to a weight that is stored without rounding gives the same bits as adding all changes again.
        exact = not moved and weight.dtype in (torch.float32, torch.float64)
        start, added = (weight, patches[done:]) if exact and done else (original, patches)
        changes = [patch.deltas[name].dense().to(weight.device) for patch in added if name in patch.deltas]
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


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of everything in a patch file."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
