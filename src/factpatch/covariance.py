"""The second moment (uncentred covariance) of each layer's inputs over a sample of ordinary texts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factpatch.backends import no_cudnn_attention
from factpatch.deltas import Delta
from factpatch.engine import check_rows_first, edited
from factpatch.errors import FileError, InputError
from factpatch.files import read_safetensors, write_safetensors
from factpatch.fingerprints import check_base
from factpatch.grouping import keys_by_value
from factpatch.models import Rows, TaskModel
from factpatch.patch import weight_shape

FORMAT = "factpatch-covariance-1"
FLOOR = 1e-3  # added to the diagonal, as a multiple of its mean
BYTES_PER_PASS = {"cpu": 1 << 30, "cuda": 8 << 30}  # memory for the sums that are computed in one pass over the texts

Example = tuple[str, str]  # a text, and the answer that the decoder of an encoder-decoder reads
Visit = Callable[[list[int], str, Tensor], None]  # called with a batch's indices, a weight name and the layer's inputs
Under = Callable[[list[int]], Mapping[str, Delta]]  # maps a batch's indices to the changes that the batch runs under


@torch.inference_mode(False)
@torch.no_grad()
@no_cudnn_attention()
def visit_inputs(
    model: TaskModel, examples: Sequence[Example], names: Iterable[str], visit: Visit, under: Under | None = None
) -> None:
    """Runs the examples and calls `visit(indices, name, X)` with each layer's inputs X (examples, tokens, in).

    The model runs unedited, or under the stacks of changes that `under(indices)` returns for a batch.

    Encoder layers read the text and decoder layers the answer, under teacher forcing. Only examples of equal length
    share a batch, so no layer ever sees padding.
    """
    for indices, rows in _unpadded_batches(model, examples):

        def watch(name: str, indices: list[int] = indices) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                x = args[0]
                check_rows_first(name, x, len(indices) == 1 or x.dim() <= 2 or x.shape[0] == len(indices))
                visit(indices, name, x.reshape(len(indices), -1, x.shape[-1]))

            return hook

        with ExitStack() as stack:
            for name in names:
                stack.callback(model.layers[name].register_forward_pre_hook(watch(name)).remove)
            stack.enter_context(edited(model.layers, under(indices) if under else {}))
            model.features(rows)


def _unpadded_batches(model: TaskModel, examples: Sequence[Example]) -> Iterator[tuple[list[int], Rows]]:
    encoded = model.encode([text for text, _ in examples])
    targets = None if model.kind == "classifier" else model.encode_targets([answer for _, answer in examples])
    lengths = {i: (len(one["input_ids"]), len(targets[i]) if targets else 0) for i, one in enumerate(encoded)}
    nowhere = torch.empty(0, dtype=torch.long, device=model.device)  # target positions: no logits are needed
    for (tokens, answer_tokens), group in sorted(keys_by_value(lengths).items()):
        for batch in model.batches([tokens + answer_tokens] * len(group)):
            indices = [group[k] for k in batch]
            chosen = [targets[i] for i in indices] if targets else None
            rows = model.collate([encoded[i] for i in indices], chosen)
            yield indices, Rows(rows.inputs, rows.labels, nowhere)


def find_readers(model: TaskModel, example: Example) -> dict[str, str]:
    """Maps each weight to the first one that reads the same input, as query, key and value projections do.

    Weights are in the order in which their layers run; layers that do not run are left out.
    """
    read: dict[str, list[Tensor]] = {}  # keeps the tensors alive, so that all ids differ

    def remember(name: str) -> Callable[..., None]:
        return lambda _, args: read.setdefault(name, []).append(args[0])

    with ExitStack() as stack:
        for name, layer in model.layers.items():
            stack.callback(layer.register_forward_pre_hook(remember(name)).remove)
        visit_inputs(model, [example], (), lambda *_: None)
    first: dict[tuple[int, ...], str] = {}
    return {name: first.setdefault(tuple(map(id, tensors)), name) for name, tensors in read.items()}


def passes(sizes: Mapping[str, int], device: torch.device) -> Iterator[list[str]]:
    """Splits layers into groups whose sums fit into memory together; `sizes` counts the float64 values of each."""
    budget = BYTES_PER_PASS.get(device.type, BYTES_PER_PASS["cpu"]) // 8
    group: list[str] = []
    used = 0
    for name, size in sizes.items():
        if group and used + size > budget:
            yield group
            group, used = [], 0
        group.append(name)
        used += size
    if group:
        yield group


@dataclass(frozen=True, eq=False)
class Covariance:
    """C = mean of k kᵀ over the inputs k of each layer, for a sample of texts with the model's own answers."""

    base: str  # fingerprint of the model's weights
    sample: str  # sha256 of the texts
    count: int  # number of texts
    moments: dict[str, Tensor]  # C (in, in), by the first weight that reads these inputs
    readers: dict[str, str]  # weight name -> key of `moments`

    @classmethod
    def compute(
        cls,
        model: TaskModel,
        texts: Iterable[str],
        predictions: Mapping[str, str] | None = None,
        weights: Collection[str] | None = None,
    ) -> Covariance:
        """Computes C. Empty texts and texts too long for the model are skipped.

        `predictions` may supply answers of the model that are already known, so that they are not generated again.
        `weights` limits C to the inputs of these weights.
        """
        sample = sorted(model.encode_readable(list(texts)))
        if not sample:
            raise InputError("expected a sample of ordinary inputs, found no usable text; give some control inputs")
        answers = dict(predictions or {})
        if model.kind != "classifier" and (missing := [text for text in sample if text not in answers]):
            answers.update(zip(missing, model.predict(missing), strict=True))
        examples = [(text, answers.get(text, "")) for text in sample]
        readers = find_readers(model, examples[0])
        readers = {name: key for name, key in readers.items() if weights is None or name in weights}
        sizes = {name: weight_shape(model.layers[name])[1] ** 2 for name in dict.fromkeys(readers.values())}
        dtype = torch.float64 if model.model.dtype == torch.float64 else torch.float32
        moments: dict[str, Tensor] = {}
        for group in passes(sizes, model.device):
            moments |= {name: C.to(dtype).cpu() for name, C in _moments(model, examples, group, dtype).items()}
        return cls(model.fingerprint, sample_hash(sample), len(sample), moments, readers)

    def of(self, name: str, device: torch.device) -> Tensor:
        """Returns C of the inputs that a weight reads, in float64, with a floor on its diagonal: (in, in).

        After a layer norm, inputs never point in some directions. Without the floor, changes in these directions would
        cost nothing, yet they take effect once an edit moves an activation there.
        """
        C = self.moments[self.readers[name]].to(device, torch.float64, copy=True)
        C.diagonal().add_(FLOOR * C.diagonal().mean())
        return C

    def check_fits(self, model: TaskModel) -> None:
        advice = "compute it again for this model"
        check_base("the covariance was computed", self.base, model.fingerprint, advice)
        for name, key in self.readers.items():
            width = weight_shape(model.layers[name])[1] if name in model.layers else None
            C = self.moments[key]
            if C.shape != (width, width) or C.dtype not in (torch.float32, torch.float64) or not C.isfinite().all():
                raise FileError(f"the covariance of {name} is damaged: wrong shape or invalid values; compute it again")

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file."""
        described = {"base": self.base, "sample": self.sample, "count": str(self.count)}
        write_safetensors(path, self.moments, {"format": FORMAT, **described, "readers": json.dumps(self.readers)})

    @classmethod
    def load(cls, path: str | Path) -> Covariance:
        metadata, moments = read_safetensors(path, "covariance", FORMAT)
        try:
            readers = checked_readers(json.loads(metadata["readers"]), moments)
            return cls(metadata["base"], metadata["sample"], int(metadata["count"]), moments, readers)
        except (ValueError, KeyError, RecursionError) as error:
            raise FileError(f"{path} is not a readable covariance file ({error}); compute it again") from error


def check_ridge(ridge: float) -> None:
    """Raises an InputError if λ, the weight of the covariance in a least-squares solve, is not a positive number."""
    if not 0 < ridge < math.inf:
        raise InputError(f"expected a ridge above 0, found {ridge}; values between 0.01 and 1 are usual")


def checked_readers(readers: Any, moments: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns `readers` if it maps names of weights to keys of `moments`. Raises a ValueError otherwise."""
    if not isinstance(readers, dict) or not all(isinstance(key, str) and key in moments for key in readers.values()):
        raise ValueError("it lacks the moments of some weights")
    return readers


def sample_hash(texts: Iterable[str]) -> str:
    """Returns a hash that identifies a sample of texts, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(texts)).encode()).hexdigest()


def _moments(
    model: TaskModel, examples: Sequence[Example], names: Sequence[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Computes C of the named layers: products of one batch in the given precision, sums over batches in float64."""
    widths = {name: weight_shape(model.layers[name])[1] for name in names}
    sums = {name: torch.zeros(width, width, dtype=torch.float64, device=model.device) for name, width in widths.items()}
    counts = dict.fromkeys(names, 0)

    def visit(_: list[int], name: str, X: Tensor) -> None:
        K = X.flatten(0, 1).to(dtype)  # (tokens, in)
        counts[name] += len(K)
        sums[name] += K.mT @ K

    visit_inputs(model, examples, names, visit)
    return {name: total / counts[name] for name, total in sums.items()}
