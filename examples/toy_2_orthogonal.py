"""Toy example 2 of the TRGP paper: the inputs of the second task are orthogonal to the first's.

Here the projection takes nothing away. The gradient of task 2 is orthogonal to everything task 1
saw, so the projected step is the step of steepest descent, and it cannot disturb task 1. TRGP
finds no related task to reuse and does the same.

The network is one linear layer without bias, for which these statements hold to rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trgp import GPM, TRGP

Batch = tuple[Tensor, Tensor]
LR = 0.1


@dataclass(frozen=True)
class Outcome:
    """Task 2's first step against steepest descent, and the losses around learning task 2."""

    steepest_step: float  # the length of -lr · gradient
    step_difference: float  # the distance from it to the step that was taken
    related_tasks: int  # how many old tasks task 2 reuses
    task_1_before: float
    task_1_after: float
    task_2_before: float
    task_2_after: float


def make_tasks() -> tuple[Batch, Batch]:
    """Two regressions on 50 inputs each, in orthogonal 3- and 5-dimensional subspaces of R^8."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(randn(8, 8)).Q
    x1 = randn(50, 3) @ basis[:, :3].T
    x2 = randn(50, 5) @ basis[:, 3:].T
    teacher = randn(8, 4)
    return (x1, x1 @ teacher), (x2, x2 @ teacher)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def run(method: type[GPM]) -> Outcome:
    """Learn the two tasks in turn with the given method."""
    torch.manual_seed(0)
    first, second = make_tasks()
    model = nn.Linear(8, 4, bias=False, dtype=torch.float64)
    learner = method(model, threshold=1.0)

    def step(optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    @torch.no_grad()
    def loss(task: int, batch: Batch) -> float:
        with learner.task(task):
            return mse(model, batch).item()

    learner.begin_task(0, [first], mse)
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=LR))
    for _ in range(500):
        step(optimizer, first)
    learner.end_task([first])
    task_1_before, task_2_before = loss(0, first), loss(0, second)

    weight = model.weight.detach().clone()
    (gradient,) = torch.autograd.grad(mse(model, second), [model.weight])

    learner.begin_task(1, [second], mse)
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=LR))
    step(optimizer, second)
    first_step = model.weight.detach() - weight
    for _ in range(499):
        step(optimizer, second)
    learner.end_task([second])

    return Outcome(
        (LR * gradient).norm().item(),
        (first_step + LR * gradient).norm().item(),
        sum(len(related) for related in learner.selected[1].values()),
        task_1_before,
        loss(0, first),
        task_2_before,
        loss(1, second),
    )


def main() -> None:
    for method in (GPM, TRGP):
        o = run(method)
        print(method.__name__)
        print(f"  steepest step of task 2  {o.steepest_step:.2e}")
        print(f"  the step taken differs   {o.step_difference:.2e}")
        print(f"  related old tasks        {o.related_tasks}")
        print(f"  task 1 loss              {o.task_1_before:.2e} -> {o.task_1_after:.2e}")
        print(f"  task 2 loss              {o.task_2_before:.2e} -> {o.task_2_after:.2e}")


if __name__ == "__main__":
    main()
