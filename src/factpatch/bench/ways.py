"""The code that benchmarks time: our editing, the published implementation, and the frozen model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from factpatch.constraints import kl
from factpatch.editors import EditBatch, HyperNetwork
from factpatch.editors.network import WeightNormLinears
from factpatch.engine import edited
from factpatch.facts import FactEdit
from factpatch.models import Causal, Rows, Seq2Seq, TaskModel
from factpatch.training.batcher import StepBatch


def propose_and_run(editor: HyperNetwork, model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """Makes a batch of edits and runs rows under them."""
    with edited(model.layers, editor.update(model, batch)):
        return model.logits(rows)


def published_edit(editor: HyperNetwork, model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """Makes one edit as the published code of KnowledgeEditor (De Cao et al., 2021) does, and runs rows with it.

    It computes the gradients of all parameters, runs one network per weight, computes a dense update of every edited
    weight, and runs the forward pass with a full set of updated parameters.
    """
    parameters = dict(model.model.named_parameters())
    with torch.enable_grad():
        model.model.requires_grad_(True)
        try:
            loss = model.losses(batch.rows).sum()
            all_gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        finally:
            model.model.requires_grad_(False)
    gradients = dict(zip(parameters, all_gradients, strict=True))
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


def published_step(
    editor: HyperNetwork, model: TaskModel, batch: StepBatch, kept: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Runs one training step of the published code, from gradients to optimizer: one edit, with dense updates."""
    (rows,) = batch.row_groups
    logits = published_edit(editor, model, batch.edit_batch, rows).float().flatten(0, -2)[rows.target_positions]
    edit_logits, control_logits = logits.split([len(batch.edit_targets.labels), len(kept)])
    loss = F.cross_entropy(edit_logits, batch.edit_targets.labels)
    divergence = kl(model.scores(kept), control_logits).mean()
    optimizer.zero_grad()
    (loss + divergence).backward()
    optimizer.step()


def frozen_alone(model: TaskModel, batch: EditBatch, rows: Rows) -> Tensor:
    """Runs the edits forward and backward and the rows forward, without editing: the minimum cost of an edit."""
    _run_backward(model, batch.rows)
    return model.logits(rows)


def edit_and_answer(editor: HyperNetwork, model: TaskModel, edit: FactEdit) -> None:
    """Proposes one edit and answers its input under it."""
    model.predict_patched(editor.propose(model, [edit]), [edit.x])


def backward_and_answer(model: TaskModel, edit: FactEdit) -> None:
    """Runs one edit forward and backward and answers its input, without editing: the minimum for the same result."""
    _run_backward(model, model.rows([edit.x], [edit.a]))
    model.predict([edit.x])


def _run_backward(model: TaskModel, rows: Rows) -> None:
    with _gradients_end_at_embeddings(model), torch.enable_grad():
        model.losses(rows).sum().backward()


def forward_and_back(model: TaskModel, network: Callable[..., Any], rows: Rows) -> None:
    """Runs rows through the frozen model and back to the embeddings: the minimum cost of a training step."""
    with _gradients_end_at_embeddings(model):
        network(**_inputs(model, rows)).logits.float().logsumexp(-1).sum().backward()


@contextmanager
def _gradients_end_at_embeddings(model: TaskModel) -> Iterator[None]:
    """Makes the backward pass end at the embeddings' outputs, so that no weight gets a gradient."""
    with ExitStack() as stack:
        for module in model.model.modules():
            if isinstance(module, nn.Embedding):
                hook = module.register_forward_hook(lambda _module, _args, output: output.detach().requires_grad_())
                stack.callback(hook.remove)
        yield


def _inputs(model: TaskModel, rows: Rows) -> dict[str, Any]:
    """Returns the arguments of the network's forward method, with which its logits are those of the targets."""
    if isinstance(model, Causal):
        assert rows.labels is not None
        return {**model.joint_inputs(rows), "use_cache": False, "logits_to_keep": rows.labels.shape[1]}
    inputs: dict[str, Any] = dict(rows.inputs)
    if isinstance(model, Seq2Seq):
        inputs["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=rows.labels)
    return inputs


def _normed_linear(layers: WeightNormLinears, i: int, x: Tensor) -> Tensor:
    return F.linear(x, torch.ops.aten._weight_norm(layers.v[i], layers.g[i][:, None], 0), layers.b[i])
