"""Networks with gates, watched methods and single steps, for tests of the comparison methods."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from helpers import mlp
from small_runs import CLASSES, End, Make, Samples, Watched
from torch import Tensor, nn

from trgp.benchmarks.data import Tensors
from trgp.benchmarks.models import MLP, ResNet18
from trgp.engine.context import Context
from trgp.engine.network import Network
from trgp.gates import HEADS, Gate
from trgp.methods import Batch, Method, Params
from trgp.methods.agem import AGEM
from trgp.methods.er import ER
from trgp.methods.ewc import EWC
from trgp.methods.hat import HAT, OWN
from trgp.methods.lwf import LwF
from trgp.methods.owm import OWM
from trgp.types import State

M = TypeVar("M", bound=Method)


class ConvHeads(nn.Module):
    """Convolutions and a linear layer with biases, BatchNorm, dropout and a head for every task.

    For images of (3, 8, 8).
    """

    def __init__(self, heads: int = 3, *, track: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6, track_running_stats=track)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8, track_running_stats=track)
        self.fc1 = nn.Linear(8 * 2 * 2, 10)
        self.bn3 = nn.BatchNorm1d(10, track_running_stats=track)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.heads = nn.ModuleList(nn.Linear(10, CLASSES) for _ in range(heads))

    def gates(self) -> list[Gate]:
        return [
            Gate("conv2", 6, ("conv1", "bn1"), ("conv2",)),
            Gate("fc1", 8, ("conv2", "bn2"), ("fc1",)),
            Gate(HEADS, 10, ("fc1", "bn3"), ()),
        ]

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(self.dropout(self.bn1(self.conv1(x)).relu()))
        x = self.pool(self.dropout(self.bn2(self.conv2(x)).relu()))
        return self.bn3(self.fc1(x.flatten(1))).relu()

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.features(x))


def residual(heads: int = 3) -> ResNet18:
    """The papers' residual network, narrow, for images of (3, 16, 16)."""
    return ResNet18(heads=heads, classes=CLASSES, filters=4, image_size=16)


def mlp_heads(heads: int = 3) -> MLP:
    """The papers' perceptron, small, with a head for every task, for 8 features."""
    return MLP(8, (12, 10), CLASSES, heads=heads)


def one_head() -> nn.Module:
    """A perceptron with one head that all tasks share, for 8 features."""
    return mlp(8, 12, 10, CLASSES)


class OneHead(MLP):
    """The same with gates, a bias in its head, and no other biases."""

    def __init__(self) -> None:
        super().__init__(8, (12, 10), CLASSES)
        self.heads = nn.ModuleList([nn.Linear(10, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def easy_tasks(count: int, *shape: int, samples: int = 20) -> list[tuple[Samples, Samples]]:
    """Tasks that a few epochs learn: samples around a pattern for each class."""
    made = []
    for task in range(count):
        draw = torch.Generator().manual_seed(task)
        patterns = torch.randn(CLASSES, *shape, generator=draw)
        y = torch.arange(2 * samples) % CLASSES
        x = patterns[y] + 0.5 * torch.randn(2 * samples, *shape, generator=draw)
        made.append(((x[:samples], y[:samples]), (x[samples:], y[samples:])))
    return made


# ---- single steps ----------------------------------------------------------------------------


def bound(method: M, make: Make, heads: bool = False, seed: int = 0) -> tuple[M, dict[str, Tensor]]:
    """A method on a network in float64, and the parameters it begins with."""
    network = Network(lambda: make().double(), heads, torch.device("cpu"), seed)
    return method.bind(network), network.initial_params()


def context(
    method: Method,
    params: Params,
    samples: Samples,
    task: int = 0,
    state: State | None = None,
    *,
    batch_size: int = 8,
    tasks: int = 3,
) -> Context:
    """A task that is about to begin or was just learnt."""
    head = task if method.network.separate_heads else 0
    given = state or {}
    return Context(
        method.network, task, head, Tensors(*samples), params, given, batch_size, 0, tasks
    )


def some_samples(count: int, *shape: int, seed: int = 0) -> Samples:
    """Random inputs in float64 and labels."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=draw)


def moved_at_random(params: Params, seed: int = 0, size: float = 0.3) -> dict[str, Tensor]:
    """The weights as if something had been learnt."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: p + size * torch.randn(p.shape, generator=draw, dtype=p.dtype)
        if p.is_floating_point() and "running" not in name
        else p.clone()
        for name, p in params.items()
    }


def eager(method: Method, params: Params) -> nn.Module:
    """A plain module that holds these parameters, in the mode that the network is in."""
    module = method.network._make()
    module.load_state_dict({k: v for k, v in params.items() if k in method.network.names})
    for ours, theirs in zip(module.modules(), method.network.module.modules(), strict=True):
        ours.training = theirs.training
    return module


def logits_of(module: nn.Module, batch: Batch, heads: bool) -> Tensor:
    return module(batch.x, batch.head) if heads else module(batch.x)


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """By name; 0 where the loss does not depend on a parameter."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


# ---- whole runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedEWC(Watched, EWC):
    pass


@dataclass(frozen=True)
class WatchedOWM(Watched, OWM):
    pass


@dataclass(frozen=True)
class WatchedAGEM(Watched, AGEM):
    pass


@dataclass(frozen=True)
class WatchedER(Watched, ER):
    pass


@dataclass(frozen=True)
class WatchedLwF(Watched, LwF):
    pass


@dataclass(frozen=True)
class WatchedHAT(Watched, HAT):
    pass


@dataclass(frozen=True)
class SaturatedHAT(Watched, HAT):
    """Begins every task with gates that are all wide open or firmly closed, at random."""

    def begin_task(self, ctx: Any) -> Any:
        params, state = super().begin_task(ctx)
        # As far as an embedding may go: an epoch of small steps does not bring it near 0.
        apart = {n: 6 * (p > 0.2).to(p.dtype) - 3 for n, p in params.items() if n.startswith(OWN)}
        return {**params, **{n: 2 * p for n, p in apart.items()}}, state


def weights_of(end: End) -> dict[str, Tensor]:
    """What the network holds, without what a method adds."""
    return {name: end.params[name] for name in end.method.network.names}
