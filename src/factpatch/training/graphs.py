"""CUDA graphs: a step's kernels are recorded once and then launched together, which saves most of the launch time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

MAX_GRAPHS = 24  # sets of shapes to record; batches of other shapes run kernel by kernel

Tensors = tuple[Tensor, ...]
Shapes = tuple[torch.Size, ...]


class Graphed:
    """Wraps a function from a batch to tensors.

    On a GPU, it records a CUDA graph for each set of shapes the second time it occurs.

    The function must run the same kernels for the same shapes, and return tensors of the same shapes for all batches.
    If it synchronises with the device, as some models do, it cannot be recorded and is called normally. Each call
    overwrites the tensors that the previous one returned.
    """

    def __init__(self, function: Callable[[Any], Tensors], enabled: bool = True):
        self.function = function
        self.max_graphs = MAX_GRAPHS if enabled else 0
        self.seen: set[Shapes] = set()
        self.graphs: dict[Shapes, _Graph] = {}
        self.stream: torch.cuda.Stream | None = None  # shared by all graphs, so that they can share memory
        self.unrecordable = ""  # the reason, if the function cannot be recorded

    def __call__(self, batch: Any) -> Tensors:
        tensors = tensors_of(batch)
        if tensors[0].device.type != "cuda":
            return self.function(batch)
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self.seen and shapes not in self.graphs and len(self.graphs) < self.max_graphs:
            self._record(shapes, batch)
        self.seen.add(shapes)
        graph = self.graphs.get(shapes)
        return graph.run(tensors) if graph else self.function(batch)

    def release(self) -> bool:
        """Frees the memory of all graphs and stops recording. Returns True if there were any graphs."""
        had = bool(self.graphs)
        self.max_graphs = 0
        self.graphs.clear()
        torch.cuda.empty_cache()
        return had

    def _record(self, shapes: Shapes, batch: Any) -> None:
        before = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        first = next(iter(self.graphs.values()), None)
        torch.cuda.empty_cache()
        try:
            self.graphs[shapes] = _Graph(self.function, batch, self.stream, first)
            return
        except torch.cuda.OutOfMemoryError:
            self.max_graphs = len(self.graphs)
        except RuntimeError as error:
            self.max_graphs, self.unrecordable = 0, str(error).splitlines()[0]
        torch.cuda.set_stream(before)  # a failed recording does not restore it
        torch.cuda.synchronize()
        if self.unrecordable:
            self.release()


class _Graph:
    def __init__(self, function: Callable[[Any], Tensors], batch: Any, stream: torch.cuda.Stream, first: _Graph | None):
        """Shares memory with the first graph, including outputs, because an editor's gradients are large."""
        batch = _copied(batch)
        self.inputs = tensors_of(batch)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = function(batch)  # lets libraries initialise on this stream, which must not happen during recording
            self.outputs = first.outputs if first else tuple(map(torch.empty_like, found))
            del found
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=first.graph.pool() if first else None, stream=stream):
            torch._foreach_copy_(self.outputs, function(batch))  # pyright: ignore (private in torch)

    def run(self, tensors: list[Tensor]) -> Tensors:
        torch._foreach_copy_(self.inputs, tensors)  # pyright: ignore (private in torch)
        self.graph.replay()
        return self.outputs


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns all tensors in nested dataclasses, dictionaries and tuples, in their order."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for value in _parts(batch).values() for tensor in tensors_of(value)]


def _copied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, tuple):
        return tuple(map(_copied, batch))
    parts = {name: _copied(value) for name, value in _parts(batch).items()}
    return type(batch)(**parts) if is_dataclass(batch) else parts or batch


def _parts(batch: Any) -> dict[Any, Any]:
    if is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, tuple):
        return dict(enumerate(batch))
    return batch if isinstance(batch, dict) else {}
