"""Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017).

After each task the diagonal empirical Fisher matrix F measures the importance of every weight, and
later tasks pay lambda/2 sum F (w - w*)^2 for moving it from its value w* after the task.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..options import check_count, check_number
from ..tree import level, tensors
from ..types import Params, State
from .base import About, Batch, Context, Method
from .limited import Limited
from .stacks import each, stacks

GRADIENTS = 1 << 24  # upper bound on gradient entries in memory at a time


@dataclass(frozen=True)
class EWC(Limited):
    """Penalise moving the weights that are important to old tasks."""

    about: ClassVar[About] = About(
        family="regularisation",
        stores="a weight's importance and old value, for every weight",
        paper="Kirkpatrick et al., PNAS 2017",
        task_id_at_test=False,
    )

    strength: float = 5000.0
    """Weight lambda of the penalty."""
    tasks_as: Literal["average", "sum"] = "average"
    """How the tasks' Fisher matrices are combined. average: the running average, around the latest
    weights; sum: the sum, each around the final weights of its task."""
    fisher_batch: int = 20
    """Batch size for the Fisher matrix: the mean gradient of a batch is squared and multiplied by
    the batch size. 1 gives the exact empirical Fisher matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength != 0:
            check_number("strength", self.strength, above=0)
        check_count("fisher_batch", self.fisher_batch)
        if self.tasks_as not in ("average", "sum"):
            raise ValueError(f"tasks_as must be average or sum, not {self.tasks_as!r}.")

    def check(self) -> None:
        modules = self.network.module.modules()
        by_batch = (m for m in modules if isinstance(m, _BatchNorm) and m.running_mean is None)
        if self.fisher_batch == 1 and any(by_batch):
            raise ValueError(
                "The network's BatchNorm uses the statistics of the current batch, which a single "
                "sample does not have; give fisher_batch 2 or more."
            )

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        loss = super().loss(params, state, batch)
        fisher, old = tensors(level(state, "fisher")), tensors(level(state, "old"))
        if not fisher:
            return loss
        parts = [(fisher[name] * (params[name] - old[name]).square()).sum() for name in fisher]
        return loss + self.strength / 2 * torch.stack(parts).sum()

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        new = self.fisher(ctx)
        weights = {name: ctx.params[name] for name in new}
        before, old = tensors(level(ctx.state, "fisher")), tensors(level(ctx.state, "old"))
        if before and self.tasks_as == "sum":
            # sum_k F_k (w - w_k)^2 is F (w - w*)^2 and a constant, with F = sum_k F_k and w* the
            # mean of the w_k by F_k: two tensors hold any number of tasks.
            total = {name: before[name] + new[name] for name in new}
            weights = {
                name: torch.where(
                    total[name] > 0,
                    (before[name] * old[name] + new[name] * weights[name]) / total[name],
                    weights[name],
                )
                for name in new
            }
            new = total
        elif before:
            new = {n: (before[n] * ctx.task + F) / (ctx.task + 1) for n, F in new.items()}
        return ctx.params, {"fisher": new, "old": weights}

    def fisher(self, ctx: Context) -> dict[str, Tensor]:
        """Diagonal Fisher matrix over the task's train samples with their labels."""
        sums = {n: torch.zeros_like(ctx.params[n]) for n in sorted(ctx.network.trainable)}
        if self.together <= 1:
            ctx.add_up(sums, partial(squared_gradients, ctx), self.fisher_batch, "fisher")
        else:
            for stack in stacks(ctx, self.fisher_batch, "fisher", self.together):
                for name, g in mean_gradients(ctx, stack).items():
                    sums[name] += stack.y.shape[1] * g.square().sum(0)
        return {name: total / len(ctx.train) for name, total in sums.items()}

    @property
    def together(self) -> int:
        """Number of batches whose gradients are computed at a time."""
        if any(isinstance(module, _ConvNd) for module in self.network.module.modules()):
            return 1  # convolutions with one kernel per batch are slower than one batch at a time
        return GRADIENTS // sum(p.numel() for p in self.network.module.parameters())


def squared_gradients(ctx: Context, batch: Batch) -> dict[str, Tensor]:
    """Squared gradient of a batch's mean loss times the batch size, by parameter."""
    grads = ctx.gradients(plain(ctx), batch)
    return {n: len(batch.y) * g.square() for n, g in grads.items() if isinstance(g, Tensor)}


def mean_gradients(ctx: Context, stack: Batch) -> dict[str, Tensor]:
    """Gradient (k, ...) of the mean loss of each of k stacked batches, by parameter."""
    count, method = len(stack.y), plain(ctx)
    weights = {name: ctx.params[name].detach() for name in ctx.network.trainable}
    free = {n: w.expand(count, *w.shape).requires_grad_() for n, w in weights.items()}

    def loss(free: Params, x: Tensor, y: Tensor) -> Tensor:
        return method.loss({**ctx.params, **free}, {}, stack._replace(x=x, y=y))

    ctx.network.module.eval()
    losses = each(loss, free, stack.x, stack.y)
    found = torch.autograd.grad(losses.sum(), list(free.values()), allow_unused=True)
    return {name: g for name, g in zip(free, found, strict=True) if g is not None}


def plain(ctx: Context) -> Method:
    """A method whose loss has no penalty."""
    return Method().bind(ctx.network)
