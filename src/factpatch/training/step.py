"""One training step of an editor: the gradients of its edits, then the optimizer, then the multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from factpatch.backends import tensor_core_products, training_attention
from factpatch.editors import TrainableEditor
from factpatch.training.batcher import StepBatch
from factpatch.training.config import TrainConfig
from factpatch.training.graphs import Graphed, Tensors
from factpatch.training.lagrangian import Lagrangian
from factpatch.training.objective import Objective
from factpatch.training.run import sum_gradients, summed
from factpatch.training.together import MergedGradients


class Learner:
    """Everything that a step changes: the editor, the multipliers and their optimizers."""

    def __init__(
        self,
        editor: TrainableEditor,
        config: TrainConfig,
        objective: Objective,
        accelerator: Accelerator,
        merged: MergedGradients | None = None,
    ):
        """`merged` computes the gradients of steps whose edits are merged into one patch."""
        self.editor = editor
        self.config = config
        self.objective = objective
        self.accelerator = accelerator
        margins = {"kl": (config.margin, config.margin_floor), "lp": (config.lp_margin, config.lp_margin_floor)}
        used = {name: margins[name] for name in config.constraints}
        annealing = config.margin_factor, config.anneal_above
        self.lagrangian = Lagrangian(used, *annealing, config.optimizer, config.multiplier)
        self.lagrangian.to(accelerator.device)
        self.parameters = list(editor.parameters())
        options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adam":
            self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **options)
        else:
            self.optimizer = torch.optim.RMSprop(self.parameters, centered=True, **options)
        self.multiplier_lr = config.multiplier_lr
        self.merged = merged
        self.graphed = Graphed(self._gradients, enabled=config.graphs and merged is None)

    def set_rates(self, editor: float, multipliers: float) -> None:
        """Sets the learning rates of the next step."""
        self.optimizer.param_groups[0]["lr"] = editor
        self.multiplier_lr = multipliers

    @tensor_core_products()
    def step(self, batches: Sequence[StepBatch]) -> Tensor:
        """Makes one update from all batches of a step, of this process and of others.

        Returns the loss, the value of each constraint and the gradient norm, still on the device: (2 + constraints,).
        """
        for parameter in self.parameters:
            parameter.grad = None
        network = self.objective.model.model
        with training_attention(network.device, network.dtype):
            figures, *gradients = self._summed(batches)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        sum_gradients(self.accelerator, self.parameters)
        figures = summed(self.accelerator, figures)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        self.optimizer.step()
        self.lagrangian.update(figures[1:], self.multiplier_lr)
        return torch.cat([figures, norm[None]])

    def _summed(self, batches: Sequence[StepBatch]) -> Tensors:
        """Returns the sums of `_gradients` over all batches; zeros in a process that has no edits of its own."""
        if len(batches) == 1:
            return self.graphed(batches[0])
        figures = torch.zeros(1 + len(self.config.constraints), device=self.accelerator.device)
        sums = (figures, *map(torch.zeros_like, self.parameters))
        for batch in batches:
            torch._foreach_add_(sums, self._gradients(batch))  # pyright: ignore (private in torch)
        return sums

    def _gradients(self, batch: StepBatch) -> Tensors:
        """Computes the loss and the constraints, (1 + constraints,), and the gradient of each editor parameter."""
        if self.merged is not None:
            return self.merged(batch, lambda found: found.loss + self.lagrangian.penalty(found.constraints))
        measured = self.objective(self.editor, batch)
        whole = measured.loss + self.lagrangian.penalty(measured.constraints)
        gradients = torch.autograd.grad(whole, self.parameters, materialize_grads=True)
        figures = torch.cat([measured.loss[None], measured.constraints]).detach()
        return figures, *(gradient.contiguous() for gradient in gradients)  # as fused optimizers need it


class Means(nn.Module):
    """Running means of a step's values, summed on the device so that steps need not wait for them."""

    sums: Tensor
    steps: Tensor

    def __init__(self, values: int):
        super().__init__()
        self.register_buffer("sums", torch.zeros(values))
        self.register_buffer("steps", torch.zeros(()))

    def add(self, values: Tensor) -> None:
        self.sums += values  # a value that is not finite stays so
        self.steps += 1

    def clear(self) -> None:
        self.sums.zero_()
        self.steps.zero_()

    def read(self) -> list[float] | None:
        return (self.sums / self.steps).tolist() if self.steps else None
