"""Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017).

After each task the diagonal empirical Fisher matrix F says how much every weight matters to it, and
later tasks pay lambda/2 sum F (w - w*)^2 for moving it from where it was, w*.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ..options import check_count, check_number
from ..tree import State, level, tensors
from .base import About, Batch, Method, Params

if TYPE_CHECKING:
    from ..engine.context import Context


@dataclass(frozen=True)
class EWC(Method):
    """Weights that mattered to old tasks are held by springs."""

    about: ClassVar[About] = About(
        family="regularisation",
        stores="a weight's importance and old value, for every weight",
        paper="Kirkpatrick et al., PNAS 2017",
        task_id_at_test=False,
    )

    strength: float = 5000.0
    """lambda, the weight of the penalty."""
    tasks_as: Literal["average", "sum"] = "average"
    """How the tasks' Fisher matrices become one: their running average, held at the latest weights,
    or their sum, each held at the weights its task ended with."""
    fisher_batch: int = 20
    """Samples whose mean gradient is squared at a time, times their number; 1 is the empirical
    Fisher matrix itself."""

    def __post_init__(self) -> None:
        if self.strength != 0:
            check_number("strength", self.strength, above=0)
        check_count("fisher_batch", self.fisher_batch)
        if self.tasks_as not in ("average", "sum"):
            raise ValueError(f"tasks_as must be average or sum, not {self.tasks_as!r}.")

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        loss = super().loss(params, state, batch)
        fisher, old = tensors(level(state, "fisher")), tensors(level(state, "old"))
        if not fisher:
            return loss
        parts = [(fisher[name] * (params[name] - old[name]).square()).sum() for name in fisher]
        return loss + self.strength / 2 * torch.stack(parts).sum()

    def end_task(self, ctx: "Context") -> tuple[Params, State]:
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

    def fisher(self, ctx: "Context") -> dict[str, Tensor]:
        """The diagonal over the task's train samples, in the network's own labels."""
        sums = {n: torch.zeros_like(ctx.params[n]) for n in sorted(ctx.network.trainable)}
        for batch in ctx.batches(self.fisher_batch, "fisher"):
            grads: Mapping[str, object] = ctx.gradients(Method.bind(_PLAIN, ctx.network), batch)
            for name, gradient in grads.items():
                assert isinstance(gradient, Tensor)
                sums[name] += len(batch.y) * gradient.square()
        return {name: total / len(ctx.train) for name, total in sums.items()}


_PLAIN = Method()
