"""Fingerprints: hashes that say which model a file was made for.

A model's fingerprint is the hash of its editable weights, followed for a decoder by a slash and the template of its
prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from factpatch.errors import MismatchError


def join_base(weights: str, template: str | None) -> str:
    """Makes a fingerprint from the hash of a model's weights and the template of its prompts."""
    return weights if template is None else f"{weights}/{template}"


def split_base(base: str) -> tuple[str, str | None]:
    """Splits a fingerprint into the hash of the weights and the template: the inverse of `join_base`."""
    weights, slash, template = base.partition("/")
    return weights, template if slash else None


def check_base(made: str, base: str, fingerprint: str, advice: str) -> None:
    """Raises a MismatchError if something was made for another model than the one with this fingerprint.

    `made` begins the message, such as "the patch was made", and `advice` ends it.
    """
    (weights, template), (model_weights, model_template) = split_base(base), split_base(fingerprint)
    if weights != model_weights:
        raise MismatchError(f"{made} for weights {weights[:12]}, but this model has {model_weights[:12]}; {advice}")
    if template != model_template:
        raise MismatchError(
            f"{made} with the template {template or 'none'!r}, this model is used with "
            f"{model_template or 'none'!r}; give the same --template"
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
