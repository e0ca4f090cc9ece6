"""Small runs that learn together, on the CPU by the very code that a GPU replays."""

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from helpers import mlp
from small_runs import CLASSES, Make, Samples
from torch import Tensor, nn

from trgp.benchmarks.common import TRGP_QUIRKS
from trgp.benchmarks.models import MLP
from trgp.engine.captured import CapturedTask
from trgp.engine.checkpoint import Checkpoints
from trgp.engine.clock import Clock
from trgp.engine.config import configure
from trgp.engine.errors import RunError
from trgp.engine.events import Observer, nobody
from trgp.engine.given import TENSORS, tensors
from trgp.engine.learning import Asked, learn
from trgp.engine.network import Network
from trgp.engine.replay import Replay
from trgp.engine.sequence import Sequencer
from trgp.engine.stream import Stream
from trgp.engine.tape import Body
from trgp.engine.train import Trained, Work, train_epoch
from trgp.methods import Method
from trgp.results.result import Result
from trgp.results.store import run_folder
from trgp.tree import leaves

T = TypeVar("T")
CPU = torch.device("cpu")
Tasks = Sequence[tuple[Samples, Samples]]

# The methods that can be stacked, with what does not fit small tasks by itself.
STACKABLE: dict[str, dict[str, Any]] = {
    "finetune": {},
    "single": {},
    "multitask": {},
    "gpm": {"threshold": 0.9},
    "trgp": {"threshold": 0.9, "epsilon": 0.3, "scale_rate": 0.3},
    "ewc": {"strength": 5.0},
    "owm": {},
    "er": {"memory_size": 20},
    "lwf": {},
    "hat": {"s_max": 20.0},
}

# TRGP's literal form, by what asks for it.
LITERAL: dict[str, dict[str, Any]] = {
    "literal": {"form": "literal"},
    "a loose direction": {"strongest_unprotected": True},
    "all quirks": {**TRGP_QUIRKS, "third_task_trusts_second": True},
}
# All that can be stacked: a method and its options.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, options) for method, options in STACKABLE.items()},
    **{f"trgp, {way}": ("trgp", STACKABLE["trgp"] | more) for way, more in LITERAL.items()},
    "trgp, a union": ("trgp", STACKABLE["trgp"] | {"scaling_over": "union"}),
}


def one_head() -> nn.Module:
    """All tasks share it."""
    return mlp(8, 12, 10, CLASSES)


def with_heads() -> MLP:
    """A head for every task, and gates.

    As wide as whole vectors of a CPU: the elements that are left over it computes otherwise, and
    where in a stack a run lies decides which of its own these are.
    """
    return MLP(8, (32, 32), CLASSES, heads=3)


def network_for(method: str) -> Make:
    return with_heads if method == "hat" else one_head


def in_float64(make: Make) -> Make:
    return lambda: make().double()


def capture_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a body of work be done once when it is captured, before its turn has come."""

    def prepare(self: Replay, kind: Hashable, body: Body, coming: int) -> None:
        if kind not in self:
            body()
            self._graphs[kind] = body

    monkeypatch.setattr(Replay, "prepare", prepare)


# ---- whole runs ------------------------------------------------------------------------------


def asked_for(
    tasks: Tasks, method: str, out: Path, make: Make, seeds: Iterable[int], **settings: Any
) -> list[Asked]:
    """Runs of a configuration from some seeds."""
    usual = {"epochs": 2, "batch": 8, "lr": 0.1, "patience": 0}
    config = configure(TENSORS, method, **(usual | settings))
    config, load = tensors(config, tasks, make)
    folder = run_folder(out, TENSORS, method, "paper", config.changed, 0).parent
    return [Asked(config, seed, load, folder / f"seed-{seed}", "a test") for seed in seeds]


def ends(
    asked: Sequence[Asked],
    *,
    captured: bool = True,
    observer: Observer = nobody,
    device: torch.device = CPU,
) -> Iterator[tuple[Asked, Result | RunError]]:
    """What becomes of runs that learn together, in the order in which they end."""
    with closing(learn(asked, device, captured, observer)) as found:
        yield from found


def company(
    tasks: Tasks,
    method: str,
    out: Path,
    make: Make = one_head,
    seeds: Iterable[int] = (0, 1, 2),
    *,
    captured: bool = True,
    observer: Observer = nobody,
    device: torch.device = CPU,
    **settings: Any,
) -> dict[int, Result]:
    """The results by seed of runs that learn together; the first error is raised."""
    asked = asked_for(tasks, method, out, make, seeds, **settings)
    results = {}
    for run, end in ends(asked, captured=captured, observer=observer, device=device):
        if isinstance(end, RunError):
            raise end
        results[run.seed] = end
    return results


def each_alone(
    tasks: Tasks,
    method: str,
    out: Path,
    make: Make = one_head,
    seeds: Iterable[int] = (0, 1, 2),
    **settings: Any,
) -> dict[int, Result]:
    """The results by seed of runs that learn one after another."""
    results: dict[int, Result] = {}
    for seed in seeds:
        results |= company(tasks, method, out, make, [seed], **settings)
    return results


def digests(results: dict[int, Result]) -> dict[int, str]:
    return {seed: result.digest for seed, result in results.items()}


# ---- single epochs ---------------------------------------------------------------------------


class Begun(NamedTuple):
    """A run that begins a task."""

    method: Method
    work: Work

    def changed(self, **changes: Any) -> "Begun":
        """The same with other settings of its epochs."""
        return self._replace(work=self.work._replace(epoch=replace(self.work.epoch, **changes)))


def begun(run: Asked, task: int, device: torch.device = CPU) -> Begun:
    """A run up to the first epoch of a task, all before it learnt step by step."""
    benchmark = run.load(run.seed, device)
    network = Network(benchmark.make_network, benchmark.separate_heads, device, run.seed)
    method = run.config.method.bind(network)
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run.folder, {}, device)
    turns = Sequencer(
        run.config, benchmark, method, run.seed, checkpoints, nobody, Clock(device)
    ).learn()
    work = next(turns)
    while work is None or work.epoch.task < task:
        work = turns.send(None if work is None else train_epoch(method, work))
    return Begun(method, work)


def after(works: Sequence[Work], trained: Sequence[Trained]) -> list[Work]:
    """The next epochs."""
    return [
        Work(end.params, end.state, replace(work.epoch, number=work.epoch.number + 1))
        for work, end in zip(works, trained, strict=True)
    ]


def returned(generator: Generator[Any, None, T]) -> T:
    """What a generator comes to, whatever it pauses for."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            found: T = end.value
            return found


def eagerly(run: Begun, epochs: int) -> Trained:
    works = [run.work]
    for _ in range(epochs):
        trained = [train_epoch(run.method, works[0])]
        works = after(works, trained)
    return trained[0]


def replayed(
    runs: Sequence[Begun], epochs: int, *, stacked: bool, device: torch.device = CPU
) -> list[Trained]:
    """The same by captured steps, of one run or of several stacked on each other."""
    works = [run.work for run in runs]
    with Stream(device, 1).turn():
        steps = CapturedTask(runs[0].method, works, stacked)
        for _ in range(epochs):
            trained = returned(steps.train(works))
            works = after(works, trained)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return trained


def all_of(method: Method, trained: Trained) -> dict[str, Tensor]:
    """Every parameter, what moves of the state, and the loss, by name."""
    moving = {key: trained.state[key] for key in method.moving if key in trained.state}
    return {**trained.params, **dict(leaves(moving)), "loss": trained.loss}


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, of every tensor in shares of its largest entry."""
    assert found.keys() == expected.keys()
    assert all(found[name].shape == tensor.shape for name, tensor in expected.items())
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3))
        for name, tensor in expected.items()
        if tensor.numel()
    )
