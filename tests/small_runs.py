"""Small tasks, networks and watched methods, for tests of whole runs."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import classification, mlp
from torch import Tensor, nn

import trgp
from trgp.gates import HEADS, Gate
from trgp.methods import Method, Params
from trgp.methods.finetune import Finetune
from trgp.methods.gpm import GPMMethod
from trgp.methods.multitask import Multitask
from trgp.methods.single import Single
from trgp.methods.trgp import TRGPMethod
from trgp.results.result import Result

Samples = tuple[Tensor, Tensor]
Make = Callable[[], nn.Module]
CLASSES = 3
CHAINS = ("pnn", "den", "rcl")  # the methods that widen chains of layers, and no other network
MEASURED = ("seconds", "peak_memory_bytes", "checksum")  # what no two runs agree in


def some_tasks(
    count: int = 3,
    *shape: int,
    samples: int = 40,
    rank: int | None = 5,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Samples, Samples]]:
    """Tasks whose inputs overlap: those of each lie in some random directions of their own."""
    shape = shape or (8,)
    rank = None if rank is None else min(rank, shape[0] - 1)
    made = []
    for task in range(count):
        x, y = classification(
            task, *shape, samples=samples + 20, classes=CLASSES, rank=rank, dtype=dtype
        )
        made.append(((x[:samples], y[:samples]), (x[samples:], y[samples:])))
    return made


class Heads(nn.Module):
    """Two hidden layers and a head for every task, for features."""

    def __init__(self, inputs: int = 8, heads: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.body = mlp(inputs, 12, 10, bias=bias)
        self.heads = nn.ModuleList(nn.Linear(10, CLASSES, bias=bias) for _ in range(heads))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.body(x).relu())


class Conv(nn.Module):
    """Plain and grouped convolutions with BatchNorm, for images of (4, 4, 4), one head."""

    def __init__(self, track: bool = True, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width, track_running_stats=track)
        self.grouped = nn.Conv2d(width, width, 2, stride=2, groups=2, bias=False)
        self.norm2 = nn.BatchNorm2d(width, track_running_stats=track)
        self.head = nn.Linear(width, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv(x)).relu()
        return self.norm2(self.grouped(x)).relu().mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Dropping(Conv):
    """The same with dropout, so that a run also depends on random numbers while it trains."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(nn.functional.dropout(x, 0.2, self.training))


class Gated(Dropping):
    """The same with a head for every task, and gates."""

    def __init__(self, heads: int = 3, track: bool = True) -> None:
        super().__init__(track)
        del self.head
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(heads))

    def gates(self) -> list[Gate]:
        return [
            Gate("grouped", 6, ("conv", "norm1"), ("grouped",)),
            Gate(HEADS, 6, ("grouped", "norm2"), ()),
        ]

    def forward(self, x: Tensor, head: int = 0) -> Tensor:  # type: ignore[override]
        return self.heads[head](self.features(x))


class Chained(Gated):
    """The same without groups: a chain of layers, which a method can widen."""

    def __init__(self, heads: int = 3, track: bool = True) -> None:
        super().__init__(heads, track)
        self.grouped = nn.Conv2d(6, 6, 2, stride=2, bias=False)


# For interruptions: a case of every method, trained so that the best epoch is not the last.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune": ("finetune", {}),
    "single": ("single", {}),
    "multitask": ("multitask", {}),
    "gpm": ("gpm", {"threshold": 0.9}),
    "trgp": ("trgp", {"threshold": 0.9, "epsilon": 0.0, "norm": "per_task"}),
    "literal": ("trgp", {"threshold": 0.9, "epsilon": 0.0, "strongest_unprotected": True}),
    "owm": ("owm", {}),
    "owm in batches": ("owm", {"narrowing": "batch"}),
    "ewc": ("ewc", {"strength": 5.0}),
    "hat": ("hat", {"s_max": 50.0}),
    "agem": ("agem", {"memory_size": 20}),
    "er": ("er", {"memory_size": 20}),
    "lwf": ("lwf", {}),
    "pnn": ("pnn", {"width": 0.5, "lr": 0.02}),
    "den": ("den", {"growth": 0.2, "phase_epochs": 2, "lr": 0.02}),
    "rcl": ("rcl", {"growth": 0.3, "trials": 4, "per_round": 2, "trial_epochs": 2, "lr": 0.02}),
    "apd": ("apd", {"consolidate_every": 2, "lr": 0.02}),
}


def network_of(case: str) -> Make:
    """What a case is learnt by: a head for every task where the method needs them."""
    method = CASES[case][0]
    if method in CHAINS:
        return Chained
    return Gated if method in ("hat", "apd") else Dropping


def run_case(case: str, out: Path, **settings: Any) -> Result:
    """A whole run of a case."""
    method, options = CASES[case]
    usual = {"epochs": 4, "patience": 2, "lr": 0.3, "evaluate_unseen": True}
    network = network_of(case)
    return run(some_tasks(3, 4, 4, 4), method, out, network, **(usual | options | settings))


class End(NamedTuple):
    """A task that a watched method has finished."""

    method: Method
    trained: Params  # the parameters as training left them
    params: Params
    state: Any

    def weights(self, task: int) -> dict[str, Tensor]:
        """What the network computes with in a task, as the run now stands."""
        return dict(self.method.weights_for(self.params, self.state, task))

    def logits(self, x: Tensor, task: int) -> Tensor:
        """Of some inputs, as they are evaluated."""
        network = self.method.network
        network.module.eval()
        with torch.no_grad():
            return network(self.weights(task), x, task if network.separate_heads else 0)


ENDS: list[End] = []


class Watched(Method):
    """Tells what every task left."""

    def end_task(self, ctx: Any) -> Any:
        params, state = super().end_task(ctx)
        ENDS.append(End(self, ctx.params, params, state))
        return params, state


@dataclass(frozen=True)
class WatchedFinetune(Watched, Finetune):
    pass


@dataclass(frozen=True)
class WatchedSingle(Watched, Single):
    pass


@dataclass(frozen=True)
class WatchedMultitask(Watched, Multitask):
    pass


@dataclass(frozen=True)
class WatchedGPM(Watched, GPMMethod):
    pass


@dataclass(frozen=True)
class WatchedTRGP(Watched, TRGPMethod):
    pass


def run(
    tasks: Sequence[tuple[Samples, Samples]],
    method: str,
    out: Path,
    network: Make = lambda: mlp(8, 12, 10, CLASSES),
    **settings: Any,
) -> Result:
    """One small run of tasks given as tensors."""
    usual = {"device": "cpu", "epochs": 2, "batch": 8, "lr": 0.1, "patience": 0}
    return trgp.run(tasks, method, network=network, out=out, **(usual | settings))[0]


def watched(
    kind: type[Method],
    tasks: Sequence[tuple[Samples, Samples]],
    out: Path,
    network: Make = lambda: mlp(8, 12, 10, CLASSES),
    **settings: Any,
) -> tuple[Result, list[End]]:
    """The same with one of the watched methods, and what it left after every task."""
    ENDS.clear()
    result = run(tasks, f"{kind.__module__}:{kind.__name__}", out, network, **settings)
    return result, list(ENDS)


def result_files(out: Path) -> list[Path]:
    return sorted(out.glob("**/result.json"))


def measured_apart(result: Result) -> dict[str, Any]:
    """All that two equal runs agree in."""
    found = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: value for name, value in found.items() if name not in MEASURED}


def in_a_new_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, which finds the modules beside this one."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process can grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
