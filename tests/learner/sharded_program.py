"""What a rank under fully_shard does: it learns tasks, saves and loads, and meets errors.

With one rank nothing is sharded. See rank_processes for how it is called.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_processes import take_part
from ranks_program import die_renaming
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trgp import GPM, TRGP

TASKS, SAMPLES = 3, 24
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Net(nn.Module):
    """Rows that two and three ranks cannot share evenly, and layers of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 11, 3, padding=1)
        self.norm = nn.LayerNorm(11)
        self.narrow = nn.Linear(11, 2)
        self.wide = nn.Linear(13, 13, bias=False)
        self.heads = nn.ModuleList(nn.Linear(13, 3) for _ in range(TASKS + 1))

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.norm(self.conv(x).tanh().mean(2))
        x = torch.cat([x, self.narrow(x).tanh()], 1)
        return self.heads[task](self.wide(x).tanh())


class Around(Net):
    """Uses a weight without calling its layer."""

    def forward(self, x: Tensor, task: int) -> Tensor:
        return super().forward(x, task) + self.wide.weight.sum()


class Broken(Net):
    """Fails between its layers while told so."""

    broken = False

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = self.norm(self.conv(x).tanh().mean(2))
        if self.broken:
            raise ArithmeticError("broken")
        x = torch.cat([x, self.narrow(x).tanh()], 1)
        return self.heads[task](self.wide(x).tanh())


def samples(task: int) -> Batch:
    """Samples of a task, in a subspace of its own."""
    g = torch.Generator().manual_seed(task)
    x = torch.randn(SAMPLES, 5, 2, generator=g, dtype=torch.float64)
    x = (x @ torch.randn(2, 12, generator=g, dtype=torch.float64)).mT
    return x, torch.arange(SAMPLES) % 3


def shard(task: int, rank: int, world: int) -> list[Batch]:
    """This rank's samples in two batches: the first of all ranks are the first half, and so on."""
    x, y = samples(task)
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    return [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in halves]


def loss_of(task: int) -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch[0], task), batch[1])


def net(world: int, kind: type[Net] = Net) -> Any:
    """The network, with one module sharded by itself and the rest with the root."""
    torch.manual_seed(0)
    model = kind()
    if world > 1:
        fully_shard(model.conv)
        fully_shard(model)
    return model


def learner_of(method: str, model: nn.Module, **options: Any) -> GPM:
    excluded: dict[str, Any] = {"exclude": ["heads.*"], "per_task": ["norm"]}
    if method == "TRGP":
        return TRGP(model, epsilon=0.0, **excluded, **options)
    return GPM(model, **excluded, **options)


def optimizer_of(kind: str, learner: GPM) -> torch.optim.Optimizer:
    params = [p for p in learner.parameters() if p.requires_grad]
    if kind == "AdamW":
        return torch.optim.AdamW(params, lr=1e-2)
    momentum = 0.9 if kind == "kept" else 0.0
    return torch.optim.SGD(params, lr=0.05, momentum=momentum, weight_decay=1e-3)


def train(
    learner: GPM, optimizer: torch.optim.Optimizer, batches: list[Batch], loss_fn: Loss
) -> None:
    """Eight steps; some after a pass that leaves the root's parameters joined, one by closure."""
    model = learner.model.train()

    def loss_of_step(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batches[step % 2])
        loss.backward()
        with torch.no_grad():
            loss_fn(model, batches[0])
        return loss

    for step in range(8):
        if step == 3:
            optimizer.step(lambda: float(loss_of_step(3).detach()))
        else:
            loss_of_step(step)
            optimizer.step()


def logits(learner: GPM, tasks: range) -> dict[str, Tensor]:
    found = {}
    for t in tasks:
        with learner.task(t), torch.no_grad():
            found[str(t)] = learner.model.eval()(samples(t)[0], t)
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {
        k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in state.items()
    }


def learn(
    rank: int, world: int, folder: Path, name: str, method: str, threshold: str, kind: str
) -> Any:
    """Three tasks and a file; a fourth with a file half-way, loaded weights, and its end."""
    learner = learner_of(method, net(world), threshold=float(threshold))
    then: dict[str, Tensor] = {}
    optimizer = optimizer_of(kind, learner)
    for t in range(TASKS):
        batches, loss_fn = shard(t, rank, world), loss_of(t)
        learner.begin_task(t, batches, loss_fn)
        if kind != "kept":
            optimizer = optimizer_of(kind, learner)
        train(learner, optimizer, batches, loss_fn)
        learner.end_task(batches)
        then |= logits(learner, range(t, t + 1))
    found = {
        "then": then,
        "now": logits(learner, range(TASKS)),
        "weights": weights(learner.model),
        "ranks": learner.ranks,
        "selected": learner.selected,
        "scalings": learner.scalings(TASKS - 1),
        "tensors": learner.state_dict()["tensors"],
    }
    learner.save(folder / f"{name}.safetensors", include_model=True)
    batches, loss_fn = shard(TASKS, rank, world), loss_of(TASKS)
    learner.begin_task(TASKS, batches, loss_fn)
    train(learner, optimizer_of("SGD", learner), batches, loss_fn)
    learner.save(folder / f"{name}-open.safetensors", include_model=True)
    good = copy.deepcopy(learner.model.state_dict())
    train(learner, optimizer_of("SGD", learner), batches, loss_fn)
    learner.model.load_state_dict(good)
    return found | finish(learner, rank, world)


def finish(learner: GPM, rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    """The rest of the fourth task, after a visit of another one."""
    batches, loss_fn = shard(TASKS, rank, world), loss_of(TASKS)
    optimizer = optimizer_of("SGD", learner)
    logits(learner, range(1))
    train(learner, optimizer, batches, loss_fn)
    learner.end_task(batches)
    return {"end": weights(learner.model), "last": logits(learner, range(TASKS + 1))}


def resume(rank: int, world: int, folder: Path, path: str) -> Any:
    """Load both files of another run, and learn the fourth task to its end."""
    loaded = TRGP.load(f"{path}.safetensors", net(world))
    found = {"now": logits(loaded, range(TASKS)), "scalings": loaded.scalings(TASKS - 1)}
    learner = TRGP.load(f"{path}-open.safetensors", net(world))
    learner.begin_task(TASKS, shard(TASKS, rank, world), loss_of(TASKS))
    found |= finish(learner, rank, world)
    plain = learner.detach(0).eval()
    with torch.no_grad():
        found["plain"] = {"0": plain(samples(0)[0], 0)}
    return found


class OldNet(nn.Sequential):
    """The model of the file that version 0.1 wrote."""

    def __init__(self) -> None:
        body = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Linear(12, 3), nn.Tanh())
        super().__init__(OrderedDict(body=body, head=nn.Linear(3, 2)))


def load_old(rank: int, world: int, folder: Path, path: str) -> Any:
    """Load a file that holds scalings, which act on all rows of C; the logits of its tasks."""
    learner = TRGP.load(path, fully_shard(OldNet()))
    x = torch.sin(torch.arange(20.0, dtype=torch.float32)).reshape(5, 4).double()
    found = []
    for task in learner.tasks:
        with learner.task(task), torch.no_grad():
            found.append(learner.model.eval()(x))
    return found


def unequal(rank: int, world: int, folder: Path) -> Any:
    """One rank has a batch more than the others, in either call; then all have the same."""
    learner = learner_of("TRGP", net(world))
    for t in range(2):
        batches, loss_fn = shard(t, rank, world), loss_of(t)
        more = batches * 2 if rank == 0 else batches
        before = weights(learner.model)
        if t:  # the first task reads one batch
            with pytest.raises(ValueError, match=f"Only 1 of {world} ranks have another batch"):
                learner.begin_task(t, more, loss_fn)
        learner.begin_task(t, batches, loss_fn)
        with pytest.raises(ValueError, match="give every rank the same number"):
            learner.end_task(more)
        after = weights(learner.model)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        train(learner, optimizer_of("SGD", learner), batches, loss_fn)
        learner.end_task(batches)
    return learner.ranks


def failing(rank: int, world: int, folder: Path) -> Any:
    """The model fails half-way on all ranks, in either call; then it works."""
    model = net(world, Broken)
    learner = learner_of("TRGP", model)
    for t in range(2):
        batches, loss_fn = shard(t, rank, world), loss_of(t)
        model.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            learner.begin_task(t, batches, loss_fn)
        model.broken = False
        learner.begin_task(t, batches, loss_fn)
        train(learner, optimizer_of("SGD", learner), batches, loss_fn)
        model.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            learner.end_task(batches)
        model.broken = False
        learner.end_task(batches)
    return learner.ranks


def foreign_rows(rank: int, world: int, folder: Path) -> Any:
    """A rank whose rows are no longer a task's says so, and the others fail with it."""
    learner = learner_of("TRGP", net(world))
    batches, loss_fn = shard(0, rank, world), loss_of(0)
    learner.begin_task(0, batches, loss_fn)
    learner.end_task(batches)
    if rank == 0:
        with torch.no_grad():
            learner.model.conv.weight.to_local().add_(1)
    sentence = "no longer holds the weights" if rank == 0 else "Another rank failed in this call"
    for call in (
        lambda: learner.begin_task(1, batches, loss_fn),
        lambda: learner.save(folder / "never"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            call()
    return not (folder / "never").exists()


def refused(rank: int, world: int, folder: Path) -> Any:
    """All that a learner cannot follow, in sentences that name it."""
    with pytest.raises(TypeError, match="'wide' is used without calling the layer"):
        learner_of("GPM", net(world, Around)).begin_task(0, shard(0, rank, world), loss_of(0))

    learner = learner_of("GPM", Net())
    fully_shard(learner.model)
    with pytest.raises(RuntimeError, match="fully_shard was applied after the learner was made"):
        learner.begin_task(0, shard(0, rank, world), loss_of(0))

    partly = Net()
    fully_shard(partly.conv)
    with pytest.raises(TypeError, match="Layer 'narrow' is not under fully_shard"):
        learner_of("GPM", partly)

    grouped = fully_shard(nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 4, 1)))
    with pytest.raises(TypeError, match="Layer '0' does not hold one row per output"):
        GPM(grouped)
    GPM(grouped, exclude=["0"])
    with pytest.raises(TypeError, match="Layer 'weight_ih_l0' is recurrent"):
        GPM(fully_shard(nn.LSTM(4, 4)))

    mesh = init_device_mesh("cpu", (world,))
    columns = fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    replicated = nn.Linear(4, 4)
    replicated.weight = nn.Parameter(distribute_tensor(replicated.weight, mesh, [Replicate()]))
    hybrid = fully_shard(
        nn.Linear(4, 4),
        mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("copies", "rows")),
    )
    for model in (columns, replicated, hybrid):
        with pytest.raises(TypeError, match="'weight' is spread over ranks otherwise than by rows"):
            GPM(model)

    flat = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="wrapped in FullyShardedDataParallel"):
        GPM(flat)


def die_saving(rank: int, world: int, folder: Path) -> Any:
    """Save after a task; in the save after the next, rank 0 is killed before the file is moved."""
    learner = learner_of("TRGP", net(world))
    for t in range(2):
        learner.begin_task(t, shard(t, rank, world), loss_of(t))
        learner.end_task(shard(t, rank, world))
        if t:
            sys.addaudithook(die_renaming)
        learner.save(folder / "learner.safetensors")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    actions = (learn, resume, load_old, unequal, failing, foreign_rows, refused, die_saving)
    take_part({action.__name__: action for action in actions})
