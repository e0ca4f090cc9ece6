"""TRGP in a training loop of your own: AdamW, one head for each task, and a saved memory.

Only the lines marked with an arrow are new; the others are the loop you already have.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trgp import TRGP

TASKS = 3


class MultiHead(nn.Module):
    """A body that all tasks share, and a classifier for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(TASKS))

    def forward(self, x: Tensor, head: int) -> Tensor:
        logits: Tensor = self.heads[head](self.body(x))
        return logits


def make_loader(task: int) -> DataLoader[tuple[Tensor, ...]]:
    """1000 points of a 6-dimensional subspace of R^50, in four classes."""
    generator = torch.Generator().manual_seed(task)
    z = torch.randn(1000, 6, generator=generator)
    x = z @ torch.randn(6, 50, generator=generator)
    y = (z @ torch.randn(6, 4, generator=generator)).abs().argmax(dim=1)
    return DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)


def loss_on(head: int) -> Callable[[nn.Module, list[Tensor]], Tensor]:
    return lambda model, batch: F.cross_entropy(model(batch[0], head), batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, task: int) -> float:
    hits = [model(x, task).argmax(dim=1) == y for x, y in make_loader(task)]
    return torch.cat(hits).double().mean().item()


def train() -> tuple[TRGP, list[float]]:
    """Learn the tasks in turn; returns the accuracy on each right after it was learnt."""
    torch.manual_seed(0)
    model = MultiHead()
    learner = TRGP(model, exclude=["heads.*"])  # <- each task has its own head: leave them alone
    learnt = []
    for task in range(TASKS):
        loader, loss_fn = make_loader(task), loss_on(task)
        learner.begin_task(task, loader, loss_fn)  # <-
        optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
        learner.attach(optimizer)  # <-
        for _ in range(10):
            for batch in loader:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        learner.end_task(loader)  # <-
        learnt.append(accuracy(model, task))
    return learner, learnt


def main() -> None:
    learner, learnt = train()
    print(learner.summary())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        learner.save(path, include_model=True)
        model = MultiHead()
        learner = TRGP.load(path, model)
    for task in range(TASKS):
        with learner.task(task):
            now = accuracy(model, task)
        print(f"task {task}: {learnt[task]:.1%} when learnt, {now:.1%} after the last and a reload")


if __name__ == "__main__":
    main()
