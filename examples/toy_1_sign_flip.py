"""Toy example 1 of the TRGP paper: the second task is the first with its inputs negated.

Both tasks span the same input subspace, so every gradient of task 2 lies where GPM lets nothing
move: the weights stay put and task 2 is not learnt, although flipping their sign would solve it.
TRGP selects task 1 as related and learns that flip in task 2's own scaling matrix Q, while the
weights, and with them task 1, stay exactly as they were.

The network is one linear layer without bias, for which these statements hold to rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trgp import GPM, TRGP

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The losses around learning task 2, and how far the weights of task 1 moved meanwhile."""

    task_1_before: float
    task_1_after: float
    task_2_before: float
    task_2_after: float
    weight_change: float


def make_tasks() -> tuple[Batch, Batch]:
    """{(x, y)} and {(-x, y)}: points of a 3-dimensional subspace of R^8 and their coordinates."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    subspace = torch.linalg.qr(directions).Q
    y = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    x = y @ subspace.T
    return (x, y), (-x, y)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def learn(learner: GPM, model: nn.Module, task: int, batch: Batch) -> None:
    learner.begin_task(task, [batch], mse)
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))
    for _ in range(500):
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
    learner.end_task([batch])


def run(method: type[GPM]) -> Outcome:
    """Learn the two tasks in turn with the given method."""
    torch.manual_seed(0)
    first, second = make_tasks()
    model = nn.Linear(8, 3, bias=False, dtype=torch.float64)
    learner = method(model, threshold=1.0)

    @torch.no_grad()
    def loss(task: int, batch: Batch) -> float:
        with learner.task(task):
            return mse(model, batch).item()

    def weight_of(task: int) -> Tensor:
        with learner.task(task):
            return model.weight.detach().clone()

    learn(learner, model, 0, first)
    # Before it is learnt, task 2 has only the network that task 1 left behind.
    task_1_before, task_2_before = loss(0, first), loss(0, second)
    weight = weight_of(0)

    learn(learner, model, 1, second)
    return Outcome(
        task_1_before,
        loss(0, first),
        task_2_before,
        loss(1, second),
        (weight_of(0) - weight).norm().item(),
    )


def main() -> None:
    print(f"{'':6}{'task 1 loss':^24}{'task 2 loss':^24}{'task 1 weights':>16}")
    print(f"{'':6}{'before':>12}{'after':>12}{'before':>12}{'after':>12}{'moved by':>16}")
    for method in (GPM, TRGP):
        o = run(method)
        losses = (o.task_1_before, o.task_1_after, o.task_2_before, o.task_2_after)
        cells = "".join(f"{loss:12.2e}" for loss in losses)
        print(f"{method.__name__:6}{cells}{o.weight_change:16.2e}")


if __name__ == "__main__":
    main()
