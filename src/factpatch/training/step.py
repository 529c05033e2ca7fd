"""One update of an editor: gradients of its edits, then the optimizer, then the multipliers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from factpatch.backends import no_cudnn_attention, tensor_core_products
from factpatch.editors import TrainableEditor
from factpatch.training.config import TrainConfig
from factpatch.training.graphs import Graphed, Tensors
from factpatch.training.lagrangian import Lagrangian
from factpatch.training.objective import Objective
from factpatch.training.run import sum_gradients, summed
from factpatch.training.table import StepBatch


class Learner:
    """All that a step changes: the editor, the multipliers, and the optimizer of both."""

    def __init__(self, editor: TrainableEditor, config: TrainConfig, objective: Objective, accelerator: Accelerator):
        self.editor = editor
        self.config = config
        self.objective = objective
        self.accelerator = accelerator
        margins = {"kl": (config.margin, config.margin_floor), "lp": (config.lp_margin, config.lp_margin_floor)}
        self.lagrangian = Lagrangian(
            {name: margins[name] for name in config.constraints}, config.margin_factor, config.anneal_above
        ).to(accelerator.device)
        self.parameters = list(editor.parameters())
        groups = [
            {"params": self.parameters, "weight_decay": config.weight_decay},
            {"params": [self.lagrangian.multipliers], "lr": config.multiplier_lr, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adam":
            self.optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
        else:
            self.optimizer = torch.optim.RMSprop(groups, lr=config.lr, centered=True)
        self.graphed = Graphed(self._gradients, enabled=config.graphs)

    @no_cudnn_attention()
    @tensor_core_products()
    def step(self, batches: Sequence[StepBatch]) -> Tensor:
        """One update from all the batches that make it up, in this process and in others.

        Returns the loss, each constraint and the gradient's norm, still on the device: (2 + constraints,).
        """
        for parameter in self.parameters:
            parameter.grad = None
        figures, *gradients = self._summed(batches)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        sum_gradients(self.accelerator, self.parameters)
        figures = summed(self.accelerator, figures)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        self.lagrangian.set_gradient(figures[1:])
        self.optimizer.step()
        self.lagrangian.clamp()
        return torch.cat([figures, norm[None]])

    def _summed(self, batches: Sequence[StepBatch]) -> Tensors:
        """Over all batches; a process without edits of its own has none."""
        if len(batches) == 1:
            return self.graphed(batches[0])
        figures = torch.zeros(1 + len(self.config.constraints), device=self.accelerator.device)
        sums = (figures, *map(torch.zeros_like, self.parameters))
        for batch in batches:
            torch._foreach_add_(sums, self._gradients(batch))  # pyright: ignore (torch exports it to nobody)
        return sums

    def _gradients(self, batch: StepBatch) -> Tensors:
        """The loss and each constraint, (1 + constraints,); then the gradient of each of the editor's parameters."""
        measured = self.objective(self.editor, batch)
        whole = measured.loss + self.lagrangian.penalty(measured.constraints)
        gradients = torch.autograd.grad(whole, self.parameters, materialize_grads=True)
        figures = torch.cat([measured.loss[None], measured.constraints]).detach()
        return figures, *(gradient.contiguous() for gradient in gradients)  # laid out as fused optimizers want it
