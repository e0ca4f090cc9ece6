"""Time TRGP on permuted digits from several seeds on the CPU: `trgp run` against a plain loop.

The yardstick is what one would write in PyTorch: a module, torch.optim.SGD, autograd, `trgp.TRGP`
beside them, one seed after another. Tasks, initial weights, batches, epochs, settings (the preset
`paper`) and what is evaluated are those of the run. Both are programs of their own, whose start
counts, and take turns.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trgp
from trgp import benchmarks
from trgp.benchmarks import Task
from trgp.benchmarks.data import Tensors
from trgp.draws import seed_of
from trgp.engine.batches import Part, epoch_batches
from trgp.engine.config import configure, defaults
from trgp.engine.pool import cores
from trgp.files import write_text
from trgp.results import metrics
from trgp.results.store import find

BENCHMARK = "permuted-digits"
TARGET = 3.0
Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def batches(samples: Tensors, size: int, *key: int | str) -> list[Batch]:
    """Every sample once, in the order in which a run has them."""
    return [(b.x, b.y) for b in epoch_batches([Part(0, 0, samples)], size, *key)]


@torch.no_grad()
def evaluated(model: nn.Module, samples: Tensors, size: int, *key: int | str) -> list[float]:
    """Mean loss and accuracy."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for x, y in batches(samples, size, *key):
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        totals += torch.stack([loss.double(), (logits.argmax(1) == y).sum().double()])
    return [float(total) / len(samples) for total in totals]


class Loop:
    """The plain loop, one seed."""

    def __init__(self, seed: int, **changes: Any) -> None:
        config = configure(BENCHMARK, "trgp", **changes)
        self.seed, self.training, self.method = seed, config.training, config.method
        benchmark = benchmarks.load(BENCHMARK, seed=seed, **vars(config.data))
        self.tasks = benchmark.tasks
        torch.manual_seed(seed_of(seed, "init", 0))
        self.model = benchmark.make_network()
        settings = config.settings
        self.learner = trgp.TRGP(
            self.model,
            threshold=settings["threshold"][0],
            epsilon=settings["epsilon"],
            top_k=settings["top_k"],
            selection_samples=settings["selection_samples"],
            memory_samples=settings["samples"],
            norm=settings["norm"],
            scale_rate=settings["scale_rate"],
        )

    def learn(self) -> list[list[float | None]]:
        """The accuracy matrix."""
        matrix: list[list[float | None]] = []
        for t, task in enumerate(self.tasks):
            self._learn_task(t, task)
            row: list[float | None] = [None] * len(self.tasks)
            for j in range(t + 1):
                with self.learner.task(j) as model:
                    row[j] = self._scores(model, j, "test")[1]
            matrix.append(row)
        return matrix

    def _learn_task(self, t: int, task: Task) -> None:
        training, model = self.training, self.model
        whole = batches(task.train, len(task.train), self.seed, "memory", t)
        self.learner.begin_task(t, whole, loss_of)
        optimizer = self.learner.attach(torch.optim.SGD(self.learner.parameters(), lr=training.lr))
        for epoch in range(training.epochs):
            model.train()
            for batch in batches(task.train, training.batch, self.seed, "order", t, epoch):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            self._scores(model, t, "valid")
        self.learner.end_task(whole)

    def _scores(self, model: nn.Module, task: int, part: str) -> list[float]:
        samples = getattr(self.tasks[task], part)
        return evaluated(model, samples, self.training.test_batch, self.seed, part, task)


def loop(seeds: int, threads: int, changes: dict[str, Any]) -> None:
    """The yardstick as a program: all seeds in turn, their ACC on stdout."""
    torch.set_num_threads(threads)
    print(json.dumps([metrics.acc(Loop(seed, **changes).learn()) for seed in range(seeds)]))


def timed(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def plain(args: argparse.Namespace) -> tuple[float, list[float]]:
    """Seconds of the yardstick, and the ACC of every seed."""
    seconds, out = timed([sys.executable, __file__, "--loop", *options(args)])
    found: list[float] = json.loads(out)
    return seconds, found


def command_line(args: argparse.Namespace) -> tuple[float, list[float]]:
    """The same of `trgp run`."""
    with TemporaryDirectory() as out:
        words = [*changes_of(args), "--device", "cpu", "--quiet", "--out", out]
        command = [sys.executable, "-m", "trgp", "run", BENCHMARK, "--seeds", str(args.seeds)]
        seconds, _ = timed([*command, *words])
        (results,) = find(out, defaults).results
        return seconds, [run.acc for run in results]


def changes_of(args: argparse.Namespace) -> list[str]:
    given = {"--tasks": args.tasks, "--epochs": args.epochs}
    return [word for k, v in given.items() if v is not None for word in (k, str(v))]


def options(args: argparse.Namespace) -> list[str]:
    return [*changes_of(args), "--seeds", str(args.seeds), "--threads", str(args.threads)]


def agree(loop: list[float], run: list[float]) -> bool:
    """Whether the means are as near as two standard errors of what the seeds differ by."""
    spread = statistics.stdev(run) if len(run) > 1 else 0.0
    apart = abs(statistics.mean(loop) - statistics.mean(run))
    return apart <= 2 * max(spread, 1e-3) / math.sqrt(len(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many are compared")
    parser.add_argument("--threads", type=int, default=1, help="of the plain loop, fastest with 1")
    parser.add_argument("--tasks", type=int, help="only so many")
    parser.add_argument("--epochs", type=int, help="in place of the preset's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also store the record here")
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        changes = {"tasks": args.tasks, "epochs": args.epochs}
        return loop(args.seeds, args.threads, {k: v for k, v in changes.items() if v is not None})
    ways: dict[str, Callable[[argparse.Namespace], tuple[float, list[float]]]] = {
        "plain loop": plain,
        "trgp run": command_line,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    acc: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            spent, acc[name] = way(args)
            seconds[name].append(spent)
            figures = ", ".join(f"{100 * each:.2f}" for each in acc[name])
            print(f"{name:10}  {spent:7.1f} s  ACC {figures} %", flush=True)
    if not agree(acc["plain loop"], acc["trgp run"]):
        raise SystemExit("The accuracies differ by more than the seeds do: the jobs are not equal.")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = medians["plain loop"] / medians["trgp run"]
    print(f"`trgp run` is {ratio:.2f}x as fast on {cores()} cores (wanted: {TARGET:g}x).")
    if args.out:
        content = {
            "command": "bench/seeds_cpu.py " + " ".join(sys.argv[1:]),
            "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "cores": cores(),
            "threads of the loop": args.threads,
            "seconds": {name: [round(s, 2) for s in each] for name, each in seconds.items()},
            "acc": acc,
            "ratio": round(ratio, 3),
            "target": TARGET,
        }
        write_text(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
