"""Benchmarks: the engine beside the published way and beside the frozen model alone, in one run on the same rows.

Models are random with the shapes of real ones: speed does not depend on what they know.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from factpatch.deltas import Delta
from factpatch.device import find_device, find_dtype
from factpatch.editors.hypernetwork import Condition, EditBatch, HyperNetwork, WeightNormLinears
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.models import Classifier, Rows, Seq2Seq, TaskModel

ANSWER_TOKENS = 8  # of a question's answer, where the shape is an encoder-decoder's


def _bert(**sizes: int) -> TaskModel:
    return Classifier(BertForSequenceClassification(BertConfig(**sizes)), _tokenizer())


def _bart() -> TaskModel:
    sizes = {
        f"{stack}_{size}": n
        for stack in ("encoder", "decoder")
        for size, n in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))
    }
    return Seq2Seq(BartForConditionalGeneration(BartConfig(d_model=768, **sizes)), _tokenizer())


def _marian() -> TaskModel:
    sizes = {
        f"{stack}_{size}": n
        for stack in ("encoder", "decoder")
        for size, n in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))
    }
    ids = {"vocab_size": 59514, "pad_token_id": 59513, "eos_token_id": 0, "decoder_start_token_id": 59513}
    return Seq2Seq(MarianMTModel(MarianConfig(d_model=512, max_position_embeddings=512, **ids, **sizes)), _tokenizer())


def _tokenizer() -> PreTrainedTokenizerFast:
    """The benchmark makes its own token numbers; a task model only wants to know that there is a tokenizer."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>"
    )


SHAPES: dict[str, Callable[[], TaskModel]] = {
    "bert-base": _bert,
    "bart-base": _bart,
    "minilm": lambda: _bert(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
    "marian": _marian,
}


def shaped_model(shape: str, device: str | None = None, precision: str | None = None) -> TaskModel:
    if shape not in SHAPES:
        raise InputError(f"expected a shape out of {', '.join(SHAPES)}, found {shape!r}")
    place, dtype = find_device(device), find_dtype(precision, device)
    model = SHAPES[shape]()
    model.model.to(device=place, dtype=dtype)
    return model


def random_rows(model: TaskModel, rows: int, tokens: int) -> Rows:
    def ids(width: int) -> Tensor:
        return torch.randint(4, 20_000, (rows, width), device=model.device)

    inputs = {
        "input_ids": ids(tokens),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=model.device),
    }
    labels = ids(1)[:, 0] % 2 if model.kind == "classifier" else ids(ANSWER_TOKENS)
    return Rows(inputs, labels)


def random_edits(model: TaskModel, edits: int, tokens: int) -> EditBatch:
    width = tokens + 2 * ANSWER_TOKENS
    ids = torch.randint(4, 20_000, (edits, width), device=model.device)
    return EditBatch(
        random_rows(model, edits, tokens), Condition(ids, torch.full((edits,), width, device=model.device))
    )


@dataclass(frozen=True)
class EditTimes:
    """Seconds, the median of several runs."""

    batch: float  # all edits at once
    one: float  # one edit alone
    reference: float  # one edit, the published way
    limit: float  # all edits' forwards and backwards through the frozen model, nothing else
    factor_bytes: int

    def summary(self, edits: int) -> dict[str, float | int]:
        return {
            "edits": edits,
            "edits_per_second": edits / self.batch,
            "reference_edits_per_second": 1 / self.reference,
            "speedup": edits / self.batch * self.reference,
            "one_edit_per_second": 1 / self.one,
            "one_edit_speedup": self.reference / self.one,
            "limit_edits_per_second": edits / self.limit,
            "fraction_of_limit": self.limit / self.batch,
            "factor_bytes": self.factor_bytes,
        }


@torch.no_grad()
def bench_edit(
    model: TaskModel,
    edits: int = 8,
    rows: int = 8,
    tokens: int = 32,
    repeats: int = 5,
    tick: Callable[[], object] = lambda: None,
) -> EditTimes:
    """Propose, then one edited forward of `rows` rows an edit; no optimizer.

    The ways take turns, so that noise hits all alike.
    """
    editor = HyperNetwork.for_model(model)
    many, one = random_edits(model, edits, tokens), random_edits(model, 1, tokens)
    many_rows, one_rows = random_rows(model, edits * rows, tokens), random_rows(model, rows, tokens)
    factor_bytes = _nbytes(editor.update(model, many))
    ways: dict[str, Callable[[], object]] = {
        "batch": lambda: propose_and_run(editor, model, many, many_rows),
        "one": lambda: propose_and_run(editor, model, one, one_rows),
        "reference": lambda: published_way(editor, model, one, one_rows),
        "limit": lambda: frozen_alone(model, many, many_rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken = _timed(way, model.device)
            tick()
            if repeat:  # the first round warms up
                seconds[name].append(taken)
    return EditTimes(factor_bytes=factor_bytes, **{name: statistics.median(taken) for name, taken in seconds.items()})


def propose_and_run(editor: HyperNetwork, model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    with edited(model.layers, editor.update(model, batch)):
        return model.logits(rows)


def published_way(editor: HyperNetwork, model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """One edit as the paper's code makes it.

    Gradients of every parameter, a network for each weight on its own, a dense change of every edited weight, and a
    forward with a full set of parameters to which the changes were added.
    """
    parameters = dict(model.model.named_parameters())
    with torch.enable_grad():
        model.model.requires_grad_(True)
        try:
            loss = model.losses(batch.rows).sum()
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        finally:
            model.model.requires_grad_(False)
    gradients = dict(zip(parameters, found, strict=True))
    h = editor.fact_encoder(batch.condition)[0]
    deltas: dict[str, Tensor] = {}
    for key, names in editor.weights_of.items():
        group = editor.groups[key]
        for i, name in enumerate(names):
            predicted = _normed_linear(group.up, i, _normed_linear(group.down, i, h).tanh())
            r, a, r_bias, a_bias, eta = predicted.to(parameters[name].dtype).split(group.split)
            gradient = gradients[name]
            assert gradient is not None
            scaled = gradient * torch.outer(r.softmax(0), a) + torch.outer(r_bias.softmax(0), a_bias)
            deltas[name] = group.max_scale * eta.sigmoid() * scaled
    changed = {name: parameter + deltas.get(name, 0) for name, parameter in parameters.items()}
    inputs = dict(rows.inputs)
    if model.kind == "seq2seq":
        inputs["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=rows.labels)
    return functional_call(model.model, changed, kwargs=inputs).logits


def frozen_alone(model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """The floor: the edits' forward and input-gradient backward, and the rows' forward, with no editing at all."""
    with ExitStack() as stack, torch.enable_grad():
        for module in model.model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(
                    module.register_forward_hook(lambda _module, _args, output: output.detach().requires_grad_()).remove
                )
        model.losses(batch.rows).sum().backward()
    return model.logits(rows)


def _normed_linear(layers: WeightNormLinears, i: int, x: Tensor) -> Tensor:
    return F.linear(x, torch.ops.aten._weight_norm(layers.v[i], layers.g[i][:, None], 0), layers.b[i])


def _nbytes(deltas: dict[str, Delta]) -> int:
    return sum(t.numel() * t.element_size() for delta in deltas.values() for t in delta.tensors.values())


def _give_memory_back() -> None:
    """So that every run starts alike, as the first edit of a process does, whatever the way before it left behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other systems have none and need none
    if trim is not None:
        trim(0)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _give_memory_back()
    synchronise()
    start = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - start
