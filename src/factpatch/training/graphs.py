"""CUDA graphs: kernels recorded once and launched together, for where launching them one by one takes the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from factpatch.device import no_waiting

MOST_GRAPHS = 8  # sets of shapes that are recorded; batches of others run kernel by kernel

Tensors = tuple[Tensor, ...]


class Graphed:
    """A function from a batch to tensors; on a GPU, each set of shapes is recorded when it comes for the second time.

    The function must do the same for the same shapes. One that waits for the device, as some models do, cannot be
    recorded and is called as it is. What a call returns is overwritten by the next.
    """

    def __init__(self, function: Callable[[Any], Tensors], enabled: bool = True):
        self.function = function
        self.enabled = enabled
        self.graphs: dict[tuple[torch.Size, ...], _Graph | None] = {}  # None: seen once
        self.unrecordable = ""  # why, where it is

    def __call__(self, batch: Any) -> Tensors:
        tensors = tensors_of(batch)
        shapes = tuple(tensor.shape for tensor in tensors)
        if tensors[0].device.type != "cuda" or self.unrecordable or not self.enabled:
            return self.function(batch)
        if shapes not in self.graphs:
            if len(self.graphs) < MOST_GRAPHS:
                self.graphs[shapes] = None
            return self.function(batch)
        graph = self.graphs[shapes] or self._record(batch)
        if graph is None:
            return self.function(batch)
        self.graphs[shapes] = graph
        return graph.run(tensors)

    def _record(self, batch: Any) -> _Graph | None:
        pool = next((graph.graph.pool() for graph in self.graphs.values() if graph), None)  # one for all: none overlap
        torch.cuda.empty_cache()
        try:
            return _Graph(self.function, batch, pool)
        except RuntimeError as error:  # out of memory is one, too
            self.unrecordable = str(error).splitlines()[0]
            self.graphs.clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return None


class _Graph:
    def __init__(self, function: Callable[[Any], Tensors], batch: Any, pool: Any):
        batch = _copied(batch)
        self.inputs = tensors_of(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), no_waiting():
            function(batch)  # sets up what this stream's libraries need, which must not happen while recording
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.outputs = function(batch)

    def run(self, tensors: list[Tensor]) -> Tensors:
        torch._foreach_copy_(self.inputs, tensors)  # pyright: ignore (torch exports it to nobody)
        self.graph.replay()
        return self.outputs


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of dataclasses and dictionaries, in their order."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for value in _parts(batch).values() for tensor in tensors_of(value)]


def _copied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.clone()
    parts = {name: _copied(value) for name, value in _parts(batch).items()}
    return type(batch)(**parts) if is_dataclass(batch) else parts or batch


def _parts(batch: Any) -> dict[str, Any]:
    if is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch if isinstance(batch, dict) else {}
