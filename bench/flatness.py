"""Time a training step of TRGP after 10 and after 100 tasks of permuted digits, at the same m.

What a step costs may grow with m, the directions that a layer's memory holds, but not with the
number of tasks. Thresholds of 1 fill the memory early, and every layer trusts two old tasks; what a
memory lacks of all directions is made up by zero columns, which change nothing, so that both steps
have tensors of the same shapes. On the CPU, one thread; the two take turns, an epoch each, and
medians are compared.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trgp
from trgp import benchmarks
from trgp.benchmarks.common import shuffled
from trgp.benchmarks.data import Tensors
from trgp.engine.batches import Part
from trgp.engine.context import Context
from trgp.engine.machine import repeatable
from trgp.engine.network import Network
from trgp.engine.train import Epoch, Work, train_epoch
from trgp.files import write_text
from trgp.methods.base import Method
from trgp.methods.trgp import TRGPMethod
from trgp.tree import leaves, level
from trgp.types import Params, State

CPU = torch.device("cpu")
BATCH, SEED = 32, 0
RATE = 0.1
TARGET = 1.2
METHOD = TRGPMethod(
    threshold=(1.0,),
    epsilon=0.0,
    top_k=2,
    samples=1294,
    selection_samples=1294,
    scale_rate=0.02,
)


@dataclass(frozen=True)
class Begun:
    """A task that is about to be trained."""

    ctx: Context
    work: Work


class Learner:
    """Learns one permutation after another, an epoch each."""

    def __init__(self, method: Method = METHOD) -> None:
        benchmark = benchmarks.load("permuted-digits", seed=SEED, tasks=1)
        self._digits = benchmark.tasks[0].train
        self._network = Network(benchmark.make_network, False, CPU, SEED)
        self.method = method.bind(self._network)
        self._params: Params = self._network.initial_params()
        self.state: State = {}
        self.done = 0

    def begin(self) -> Begun:
        """The next task, which leaves no trace until it is learnt."""
        x, y = self._digits.x, self._digits.y
        order = shuffled(x[0].numel(), self.done)
        samples = Tensors(x.flatten(1)[:, order].view_as(x), y, self._digits.normalisation)
        task, network = self.done, self._network
        ctx = Context(
            network, task, 0, samples, self._params, self.state, BATCH, SEED, tasks=task + 1
        )
        params, state = self.method.begin_task(ctx)
        free = network.trainable - self.method.frozen(task)
        trained = [name for name in params if name in free or name not in network.names]
        epoch = Epoch(SEED, task, 0, [Part(task, 0, samples)], BATCH, RATE, trained)
        return Begun(ctx, Work(params, state, epoch))

    def learn(self) -> None:
        begun = self.begin()
        trained = train_epoch(self.method, begun.work)
        ended = replace(begun.ctx, params=trained.params, state=trained.state)
        self._params, self.state = self.method.end_task(ended)
        self.done += 1

    def full(self) -> Work:
        """The next task, its memories filled up by zero columns."""
        work = self.begin().work
        params = self.method.to_stack(work.params, work.state)
        return work._replace(params=params, state={**work.state, **self.method.padded(work.state)})


def widths(learner: Learner) -> dict[str, int]:
    """m of every layer, as learnt."""
    ranks = learner.method.report(learner.state).ranks or {}
    return {name: each[-1] for name, each in ranks.items()}


def shapes(state: State) -> dict[str, tuple[int, ...]]:
    """Of all that a step reads beside the parameters."""
    return {path: tuple(tensor.shape) for path, tensor in leaves(level(state, "task"))}


def milliseconds(method: Method, works: dict[int, Work], rounds: int) -> dict[int, list[float]]:
    """A step's, by how many tasks were learnt before; the works take turns."""
    times: dict[int, list[float]] = {tasks: [] for tasks in works}
    for k in range(rounds + 1):
        for tasks, work in works.items():
            start = time.perf_counter()
            train_epoch(method, work)
            if k:  # the first is to warm up
                times[tasks].append(1e3 * (time.perf_counter() - start) / work.epoch.steps)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--many", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60, help="epochs that medians are over")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also store the record here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with repeatable(CPU):
        learner = Learner()
        works: dict[int, Work] = {}
        found: dict[int, dict[str, int]] = {}
        for tasks in (args.few, args.many):
            while learner.done < tasks:
                learner.learn()
            works[tasks], found[tasks] = learner.full(), widths(learner)
            print(f"after {tasks} tasks: m {found[tasks]}", flush=True)
        few, many = (shapes(work.state) for work in works.values())
        if few != many:
            raise SystemExit("The steps have tensors of different shapes: they cannot be compared.")
        times = milliseconds(learner.method, works, args.rounds)
    medians = {tasks: statistics.median(each) for tasks, each in times.items()}
    ratio = medians[args.many] / medians[args.few]
    for tasks, ms in medians.items():
        print(f"a step after {tasks:3} tasks: {ms:.4f} ms")
    print(f"{ratio:.3f}x (wanted: {TARGET:g}x at most)")
    if args.out:
        content: dict[str, Any] = {
            "command": "bench/flatness.py " + " ".join(sys.argv[1:]),
            "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "m as learnt": {str(tasks): each for tasks, each in found.items()},
            "rounds": args.rounds,
            "ms": {str(tasks): round(ms, 5) for tasks, ms in medians.items()},
            "ratio": round(ratio, 4),
            "target": TARGET,
        }
        write_text(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
