"""What a rank of data parallel training does: it learns tasks from a shard of their samples.

See rank_processes for how it is called.
"""

import copy
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_processes import take_part
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trgp import GPM, TRGP

TASKS, SAMPLES = 5, 24


class Net(nn.Module):
    """A convolution with a norm layer, linear layers with and without a bias, one head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.wide = nn.Linear(12, 13)
        self.plain = nn.Linear(13, 12, bias=False)
        self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(TASKS))

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.norm(self.conv(x)).tanh().mean(2)
        return self.heads[task](self.plain(self.wide(x).tanh()).tanh())


def samples(task: int) -> tuple[Tensor, Tensor]:
    """Samples of a task, in a subspace of its own."""
    g = torch.Generator().manual_seed(task)
    x = torch.randn(SAMPLES, 5, 2, generator=g, dtype=torch.float64)
    x = (x @ torch.randn(2, 6, generator=g, dtype=torch.float64)).mT
    return x, torch.arange(SAMPLES) % 3


def shard(task: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's samples in two batches, fewer on the last rank."""
    x, y = samples(task)
    borders = [SAMPLES * i // world + (1 if 0 < i < world else 0) for i in range(world + 1)]
    mine = slice(borders[rank], borders[rank + 1])
    return list(zip(x[mine].split(5), y[mine].split(5), strict=True))


def learner_of(method: str, model: nn.Module, **options: Any) -> GPM:
    """The learner that every rank makes."""
    if method == "TRGP":
        return TRGP(model, exclude=["heads.*"], epsilon=0.0, **options)
    return GPM(model, exclude=["heads.*"], **options)


def learn(learner: GPM, wrap: str, rank: int, world: int) -> dict[str, Any]:
    """Learn all tasks; the logits of each when it was learnt, and at the end.

    wrap: whether DDP is made "once" or in every "task"; "untrained" takes no step at all.
    """
    model = learner.model
    wrapped = (
        DistributedDataParallel(model, find_unused_parameters=True) if wrap == "once" else model
    )
    then, now = {}, {}
    for t in range(TASKS):
        batches = shard(t, rank, world)

        def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor], task: int = t) -> Tensor:
            return F.cross_entropy(m(batch[0], task), batch[1])

        learner.begin_task(t, batches, loss_fn)
        if wrap == "task":
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        wrapped.train()
        for step in range(0 if wrap == "untrained" else 6):
            optimizer.zero_grad()
            loss_fn(wrapped, batches[step % 2]).backward()
            optimizer.step()
        learner.end_task(batches)
        model.eval()
        then[str(t)] = model(samples(t)[0], t).detach()
    for t in range(TASKS):
        with learner.task(t), torch.no_grad():
            model.eval()
            now[str(t)] = model(samples(t)[0], t)
    return {"then": then, "now": now}


def train_all(rank: int, world: int, folder: Path, method: str, wrap: str) -> Any:
    """Learn all tasks and save what is known."""
    torch.manual_seed(0)
    learner = learner_of(method, Net().double(), threshold=1.0)
    logits = learn(learner, wrap, rank, world)
    learner.save(folder / "learner.safetensors", include_model=True)
    return logits | {
        "tensors": learner.state_dict()["tensors"],
        "model": learner.model.state_dict(),
        "ranks": learner.ranks,
        "selected": learner.selected,
    }


def fail_on_last(rank: int, world: int, folder: Path) -> Any:
    """One rank's loss fails in begin_task, later in end_task; then both go on."""
    torch.manual_seed(0)
    learner = learner_of("TRGP", Net().double(), threshold=1.0)
    wrapped = DistributedDataParallel(learner.model, find_unused_parameters=True)
    said = []
    broken = False

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if broken and rank == world - 1:
            raise ArithmeticError("no loss")
        return F.cross_entropy(m(batch[0], len(learner.tasks)), batch[1])

    def refused(call: Callable[[], object]) -> None:
        nonlocal broken
        state, weights = learner.state_dict(), copy.deepcopy(learner.model.state_dict())
        broken = True
        with pytest.raises((RuntimeError, ArithmeticError)) as error:
            call()
        broken = False
        said.append(str(error.value))
        now = learner.state_dict()
        assert now["meta"] == state["meta"]
        weights_now = learner.model.state_dict()
        assert all(torch.equal(weights_now[key], value) for key, value in weights.items())
        assert all(torch.equal(now["tensors"][k], v) for k, v in state["tensors"].items())

    for t in range(2):
        batches = shard(t, rank, world)
        refused(partial(learner.begin_task, t, batches, loss_fn))
        learner.begin_task(t, batches, loss_fn)
        optimizer = torch.optim.SGD([p for p in learner.parameters() if p.requires_grad], lr=0.1)
        loss_fn(wrapped, batches[0]).backward()
        optimizer.step()
        refused(partial(learner.end_task, batches))
        learner.end_task(batches)
    return said, learner.ranks


def count_samples(rank: int, world: int, folder: Path, limit: str) -> Any:
    """How many samples of this rank choose the trust region and feed the memory."""
    torch.manual_seed(0)
    limits = {"selection_samples": int(limit), "memory_samples": int(limit)}
    learner = learner_of("TRGP", Net().double(), **limits)
    seen = []

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return F.cross_entropy(m(batch[0], len(learner.tasks)), batch[1])

    found = []
    for t in range(2):
        batches = shard(t, rank, world)
        learner.begin_task(t, batches, loss_fn)
        found.append(sum(seen))
        seen.clear()
        learner.end_task(batches)
        found.append(sum(seen))
        seen.clear()
    return found


def die_saving(rank: int, world: int, folder: Path) -> Any:
    """Save after a task; in the save after the next, rank 0 is killed before the file is moved."""
    torch.manual_seed(0)
    learner = learner_of("TRGP", Net().double())
    path = folder / "learner.safetensors"
    for t in range(2):
        batches = shard(t, rank, world)

        def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor], task: int = t) -> Tensor:
            return F.cross_entropy(m(batch[0], task), batch[1])

        learner.begin_task(t, batches, loss_fn)
        learner.end_task(batches)
        if t:
            sys.addaudithook(die_renaming)
        learner.save(path)


def die_renaming(event: str, args: object) -> None:
    """End this process as if the machine did, before a file is renamed."""
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    actions = (train_all, fail_on_last, count_samples, die_saving)
    take_part({action.__name__: action for action in actions})
