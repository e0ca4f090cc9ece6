"""One rank of several that learn tasks from shards of their samples, and write what they hold.

Called as `ranks_program.py RANK WORLD PORT FOLDER METHOD WRAP` by test_ranks, once per rank.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def main() -> None:
    """Run one rank."""
    rank, world, port, folder, method, wrap = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net().double()
    if int(world) > 1:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world)
        )
    learner = learner_of(method, model, threshold=1.0)
    logits = learn(learner, wrap, int(rank), int(world))
    state = learner.state_dict()
    learner.save(Path(folder) / "learner.safetensors", include_model=True)
    torch.save(
        {
            "tensors": state["tensors"],
            "model": model.state_dict(),
            "ranks": learner.ranks,
            "selected": learner.selected,
            **logits,
        },
        Path(folder) / f"rank-{rank}.pt",
    )
    if int(world) > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
