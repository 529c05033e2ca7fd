"""StoredModel: a Hugging Face model's weights, their identity and precision, and how they are saved."""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from factpatch.files import atomic_folder
from factpatch.fingerprints import hash_weights, join_base
from factpatch.models.gpu import use_gpu_kernels
from factpatch.models.layers import editable_layers
from factpatch.patch import Patch, set_patches, unpatched

Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound="StoredModel")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Model, Arguments], Result],
) -> Callable[Concatenate[Model, Arguments], Result]:
    """Decorates a model's method so that other threads that use the model wait until it returns."""

    @wraps(method)
    def locked(self: Model, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class StoredModel(ABC):
    """A model, frozen and in eval mode, with its tokenizer and the patches that are applied to it.

    A thread that predicts, edits or patches holds `lock`, and other threads wait. A thread can acquire the lock several
    times, so these methods may call each other.
    """

    prompt_template: str | None = None  # how a decoder's questions become prompts

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.layers: dict[str, nn.Module] = editable_layers(model)  # by weight name
        self.patches: list[Patch] = []
        self.originals: dict[str, Tensor] = {}  # unpatched weights of the layers that these patches change
        self.lock = threading.RLock()
        use_gpu_kernels(model)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}  # a lock cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    @abstractmethod
    def decision_settings(self) -> dict[str, Any]:
        """Returns the settings that affect answers besides the weights, such as labels."""

    @cached_property
    @exclusive
    def fingerprint(self) -> str:
        """The hash of the editable weights as stored, without patches, followed by the prompts' template, if any.

        A patch or an editor fits models with the same fingerprint.
        """
        weights = dict(self.model.named_parameters())
        unpatched = {name: self.originals.get(name, weights[name]) for name in self.layers}
        return join_base(hash_weights(unpatched), self.prompt_template)

    @cached_property
    @exclusive
    def identity(self) -> str:
        """The hash of all weights as stored, without patches, and of the settings that affect answers.

        Models with the same identity give the same answers up to rounding: precision and device do not change it.
        """
        weights = hash_weights({**self.model.state_dict(), **self.originals})
        settings = json.dumps(self.decision_settings(), sort_keys=True, default=str)
        return hashlib.sha256(f"{weights} {settings}".encode()).hexdigest()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def word_embeddings(self) -> Tensor:
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings.weight, Tensor)
        return embeddings.weight

    @exclusive
    def cast(self, dtype: torch.dtype) -> Self:
        """Changes the precision permanently; fingerprint and identity remain those of the stored weights."""
        if any(torch.promote_types(weight.dtype, dtype) != dtype for weight in self.model.parameters()):
            _ = self.fingerprint, self.identity  # computed and cached now, because the cast loses bits
        with unpatched(self):
            self.model.to(dtype)
        return self

    @contextmanager
    def in_precision(self, dtype: torch.dtype) -> Iterator[Self]:
        """Casts the model for a `with` block; afterwards its weights and precision are exactly as before."""
        if all(weight.dtype == dtype for weight in self.model.parameters()):
            yield self
            return
        with self.lock:
            named = self.model.named_parameters()
            weights = [(weight, self.originals.get(name, weight.data)) for name, weight in named]
            buffers = [(module, dict(module._buffers)) for module in self.model.modules()]
            try:
                yield self.cast(dtype)
            finally:
                for weight, data in weights:
                    weight.data = data
                for module, before in buffers:
                    module._buffers.update(before)
                patches, self.patches, self.originals = self.patches, [], {}
                set_patches(self, patches)

    def save(self, folder: str | Path) -> None:
        """Writes an ordinary Hugging Face folder. Applied patches become part of its weights."""
        with atomic_folder(folder) as scratch:
            self.write_to(scratch)

    @exclusive
    def write_to(self, folder: Path) -> None:
        """Writes the model's files into an existing folder."""
        self.model.save_pretrained(folder)
        try:
            self.tokenizer.save_pretrained(folder)
        except Exception as error:  # the tokenizers library raises no other type, even for a full disk
            if "os error" not in str(error):
                raise
            raise OSError(str(error)) from error
