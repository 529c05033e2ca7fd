"""Benchmarks: the engine beside the published way and beside the frozen model alone, in one run on the same rows.

Models are random with the shapes of real ones: speed does not depend on what they know.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
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

from factpatch.constraints import kl
from factpatch.deltas import Delta
from factpatch.device import find_device, find_dtype, no_cudnn_attention, tensor_core_products
from factpatch.editors.hypernetwork import EditBatch, HyperNetwork
from factpatch.editors.network import Condition, WeightNormLinears
from factpatch.engine import edited
from factpatch.errors import InputError
from factpatch.models import Classifier, Rows, Seq2Seq, TaskModel
from factpatch.training import TrainConfig
from factpatch.training.objective import Objective
from factpatch.training.step import Learner
from factpatch.training.table import StepBatch, Targets

ANSWER_TOKENS = 8  # of a question's answer, where the shape is an encoder-decoder's


def _bert(**sizes: int) -> TaskModel:
    return Classifier(BertForSequenceClassification(BertConfig(**sizes)), _tokenizer())


def _bart() -> TaskModel:
    config = BartConfig(d_model=768, **_stacks(layers=6, attention_heads=12, ffn_dim=3072))
    return Seq2Seq(BartForConditionalGeneration(config), _tokenizer())


def _marian() -> TaskModel:
    ids = {"vocab_size": 59514, "pad_token_id": 59513, "eos_token_id": 0, "decoder_start_token_id": 59513}
    sizes = _stacks(layers=6, attention_heads=8, ffn_dim=2048)
    return Seq2Seq(MarianMTModel(MarianConfig(d_model=512, max_position_embeddings=512, **ids, **sizes)), _tokenizer())


def _stacks(**sizes: int) -> dict[str, int]:
    """The same for encoder and decoder."""
    return {f"{stack}_{size}": n for stack in ("encoder", "decoder") for size, n in sizes.items()}


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
    tokens: int = 16,
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


# Training


@dataclass(frozen=True)
class TrainTimes:
    """Seconds of one step, the median of several; and of the first three together, of which one is being recorded."""

    step: float  # of all edits, as training takes it
    reference: float  # of one edit, the published way
    limit: float  # all rows forward, and backward to their inputs, through the frozen model alone
    prepared: float
    recorded: bool  # whether the step ran as a CUDA graph
    factor_bytes: int

    def summary(self, edits: int) -> dict[str, float | int]:
        return {
            "edits": edits,
            "edits_per_second": edits / self.step,
            "reference_edits_per_second": 1 / self.reference,
            "speedup": edits / self.step * self.reference,
            "limit_edits_per_second": edits / self.limit,
            "fraction_of_limit": self.limit / self.step,
            "prepare_seconds": self.prepared,
            "recorded": self.recorded,
            "factor_bytes": self.factor_bytes,
        }


@no_cudnn_attention()
@tensor_core_products()
def bench_train(
    model: TaskModel,
    edits: int = 128,
    rows: int = 16,
    tokens: int = 32,
    repeats: int = 20,
    tick: Callable[[], object] = lambda: None,
) -> TrainTimes:
    """A step of the training loop, the published way's with one edit, and the least that any step must do."""
    config = TrainConfig(edits=edits, rows=rows, max_tokens=tokens)
    accelerator = Accelerator(cpu=model.device.type == "cpu")
    editor = HyperNetwork.for_model(model)
    batch, one = random_step(model, edits, rows, tokens), random_step(model, 1, rows, tokens)
    with torch.no_grad():
        factor_bytes = _nbytes(editor.update(model, batch.fact))
        objective = Objective(model, config, kept_features(model, batch))
        kept_of_one = kept_features(model, one)
    learner = Learner(editor, config, objective, accelerator)
    optimizer = torch.optim.RMSprop(editor.parameters(), lr=config.lr, centered=True)
    limits: list[Callable[[], object]] = [lambda: forward_and_back(model, model.model, batch.rows)]
    if model.device.type == "cuda":
        compiled = torch.compile(model.model)
        limits.append(lambda: forward_and_back(model, compiled, batch.rows))
        limits[-1]()
    ways: dict[str, list[Callable[[], object]]] = {
        "step": [lambda: learner.step([batch])],
        "reference": [lambda: published_step(editor, model, one, kept_of_one, optimizer)],
        "limit": limits,
    }
    start = time.perf_counter()
    for way in ways["step"] * 3:  # the first runs kernel by kernel, the second is recorded
        way()
    prepared = time.perf_counter() - start
    medians = {name: min(_median(way, model.device, repeats, tick) for way in found) for name, found in ways.items()}
    recorded = bool(learner.graphed.graphs)
    return TrainTimes(prepared=prepared, recorded=recorded, factor_bytes=factor_bytes, **medians)


def random_step(model: TaskModel, edits: int, rows: int, tokens: int) -> StepBatch:
    """A step's batch: of each edit's rows, two are to change and the others to stay."""
    batch = random_rows(model, edits * rows, tokens)
    labels = batch.labels
    assert labels is not None
    answer = labels[0].numel()
    places = torch.arange(edits * rows * answer, device=model.device).view(edits, rows, answer)
    edit, keep = places[:, :2].flatten(), places[:, 2:].flatten()

    def targets(chosen: Tensor) -> Targets:
        weights = torch.full((len(chosen),), 1 / len(chosen), device=model.device)
        return Targets(labels.flatten()[chosen], weights, torch.arange(len(chosen), device=model.device))

    chosen = Rows(batch.inputs, labels, torch.cat([edit, keep]))
    return StepBatch(random_edits(model, edits, tokens), chosen, targets(edit), targets(keep))


def kept_features(model: TaskModel, batch: StepBatch) -> Tensor:
    assert batch.rows.places is not None
    return model.features(Rows(batch.rows.inputs, batch.rows.labels, batch.rows.places[len(batch.edit.labels) :]))


def published_step(
    editor: HyperNetwork, model: TaskModel, batch: StepBatch, kept: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """One edit a step, dense, as the paper's code trains: everything from the gradients to the optimizer."""
    logits = published_way(editor, model, batch.fact, batch.rows).float().flatten(0, -2)
    assert batch.rows.places is not None
    edit, keep = logits[batch.rows.places].split([len(batch.edit.labels), len(batch.keep.labels)])
    loss = F.cross_entropy(edit, batch.edit.labels)
    moved = kl(model.scores(kept), keep).mean()
    optimizer.zero_grad()
    (loss + moved).backward()
    optimizer.step()


def forward_and_back(model: TaskModel, network: Callable[..., Any], rows: Rows) -> None:
    """The rows through the frozen model, and back to the embeddings: what every way of training must do."""
    with _gradients_start_at_embeddings(model):
        network(**_inputs(model, rows)).logits.float().logsumexp(-1).sum().backward()


# Evaluation


def bench_evaluate(
    model: TaskModel,
    edits: int | None = None,
    rows: int = 128,
    tokens: int = 16,
    repeats: int = 20,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, float | int | None]:
    """Rows a second under patches, and of the unedited model."""
    editor = HyperNetwork.for_model(model)
    edits = edits or editor.at_once(model)
    batch = random_rows(model, edits * rows, tokens)
    with torch.no_grad():
        deltas = editor.update(model, random_edits(model, edits, tokens))

        def under_patches() -> None:
            with edited(model.layers, deltas):
                model.logits(batch)

        ways = {"patched": under_patches, "unedited": lambda: model.logits(batch)}
        seconds = {name: _median(way, model.device, repeats, tick) for name, way in ways.items()}
    return {
        "edits": edits,
        "edits_per_second": edits / seconds["patched"],
        "reference_edits_per_second": None,  # the published way has no batches to compare with
        "speedup": None,
        "limit_edits_per_second": edits / seconds["unedited"],
        "fraction_of_limit": seconds["unedited"] / seconds["patched"],
        "rows_per_second": len(batch) / seconds["patched"],
        "unedited_rows_per_second": len(batch) / seconds["unedited"],
        "factor_bytes": _nbytes(deltas),
    }


def _median(run: Callable[[], object], device: torch.device, repeats: int, tick: Callable[[], object]) -> float:
    """Of synchronised runs, after one that warms up."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        taken.append(_timed(run, device))
        tick()
    return statistics.median(taken[1:])


# The ways


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
    return functional_call(model.model, changed, kwargs=_inputs(model, rows)).logits


def frozen_alone(model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """The floor: the edits' forward and input-gradient backward, and the rows' forward, with no editing at all."""
    with _gradients_start_at_embeddings(model), torch.enable_grad():
        model.losses(batch.rows).sum().backward()
    return model.logits(rows)


@contextmanager
def _gradients_start_at_embeddings(model: TaskModel) -> Iterator[None]:
    """As if the inputs were what is trained: the least that a backward through a frozen model can do."""
    with ExitStack() as stack:
        for module in model.model.modules():
            if isinstance(module, nn.Embedding):
                hook = module.register_forward_hook(lambda _module, _args, output: output.detach().requires_grad_())
                stack.callback(hook.remove)
        yield


def _inputs(model: TaskModel, rows: Rows) -> dict[str, Tensor]:
    """What the network itself takes."""
    inputs = dict(rows.inputs)
    if isinstance(model, Seq2Seq):
        inputs["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=rows.labels)
    return inputs


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
