"""Time the engine's training steps on a GPU: milliseconds per run-step, and what they are made of.

A run-step is one step of one run: the wall time of an epoch divided by its steps and by the runs
that learn together. Synthetic data; every layer's memory fills 30 % of its inputs' width, and two
old tasks, whose bases are each half of it, are trusted everywhere. Projections are in full float32,
convolutions in cuDNN's default (TF32), dropout is on. What is timed is warm: making and capturing
the steps is told apart. The yardstick is TRGP in dense matrices, step by step, as published.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from dense import Dense
from torch import nn

import trgp
from trgp.benchmarks.data import Tensors
from trgp.benchmarks.models import MLP, AlexNet, LeNet, ResNet18
from trgp.engine.batches import Part
from trgp.engine.captured import CapturedTask
from trgp.engine.company import stacks_well
from trgp.engine.context import Context
from trgp.engine.machine import repeatable, settle_libraries
from trgp.engine.network import Network
from trgp.engine.stream import Stream
from trgp.engine.train import Epoch, Trained, Work, train_epoch
from trgp.files import write_text
from trgp.methods.base import Method
from trgp.methods.finetune import Finetune
from trgp.methods.gpm import GPMMethod
from trgp.methods.layerwise import Layerwise
from trgp.methods.protected import Directions
from trgp.methods.trgp import TRGPMethod

SHARE = 0.3
TASK = 2  # the third: two old ones to trust
SHORTCUTS = ("*.shortcut",)


@dataclass(frozen=True)
class Net:
    """A network of the papers, as it is trained there."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int
    several_heads: bool = True
    no_scaling: tuple[str, ...] = ()
    published: float = 0.0
    target: float = 0.0
    """Milliseconds a step: of the published code on an H200, and what this is to come to."""


NETS = {
    "MLP": Net(MLP, (784,), 10, 2000, several_heads=False, published=4.23, target=0.025),
    "AlexNet": Net(AlexNet, (3, 32, 32), 64, 75, published=10.4, target=0.40),
    "LeNet": Net(LeNet, (3, 32, 32), 64, 75, no_scaling=("fc1", "fc2"), published=6.4, target=0.20),
    "ResNet18, 32x32": Net(
        ResNet18, (3, 32, 32), 64, 40, no_scaling=SHORTCUTS, published=28.8, target=1.0
    ),
    "ResNet18, 84x84": Net(
        lambda: ResNet18(20, 5, image_size=84, stride=2),
        (3, 84, 84),
        64,
        40,
        no_scaling=SHORTCUTS,
        published=28.6,
        target=1.5,
    ),
}


def methods(net: Net) -> dict[str, Method]:
    """What is timed, in the order of the table."""
    trusting: dict[str, Any] = {"epsilon": 0.0, "top_k": 2, "no_scaling": net.no_scaling}
    return {
        "SGD": Finetune(),
        "GPM": GPMMethod(),
        "TRGP": TRGPMethod(**trusting),
        "TRGP literal": TRGPMethod(**trusting, form="literal"),
    }


def begun(net: Net, method: Method, seed: int, device: torch.device) -> tuple[Method, Work]:
    """A run at the beginning of its third task."""
    network = Network(net.make, net.several_heads, device, seed)
    method = method.bind(network)
    draw = torch.Generator(device).manual_seed(seed)
    count = net.batch * net.steps
    x = torch.randn(count, *net.shape, generator=draw, device=device)
    classes = network(network.initial_params(), x[:2], 0).shape[1]
    y = torch.randint(classes, (count,), generator=draw, device=device)
    samples = Tensors(x, y)
    head = TASK if net.several_heads else 0
    state: dict[str, Any] = {}
    if isinstance(method, Layerwise):
        memory = {
            name: random_directions(each.layer.shape, draw).state()
            for name, each in method.layers.items()
        }
        state = {"memory": memory}
    params = network.initial_params()
    ctx = Context(network, TASK, head, samples, params, state, net.batch, seed, 10)
    started, begun_state = method.begin_task(ctx)
    free = network.trainable - method.frozen(TASK)
    trained = [name for name in started if name in free or name not in network.names]
    epoch = Epoch(seed, TASK, 0, [Part(TASK, head, samples)], net.batch, 0.001, trained)
    return method, Work(started, begun_state, epoch)


def random_directions(shape: tuple[int, int, int], draw: torch.Generator) -> Directions:
    """M fills a share of the width; the one old task has one half of it, the other the other."""
    g, _, n = shape
    m = max(2, round(SHARE * n))
    M = torch.linalg.qr(torch.randn(g, n, m, generator=draw, device=draw.device).double()).Q
    first = (torch.arange(m, device=draw.device) < m // 2).expand(g, m)
    ranks = torch.full((g,), m, device=draw.device)
    return Directions(M.float(), ranks, {0: first, 1: ~first})


class Together:
    """Runs that learn at the same time, as the engine lets them."""

    def __init__(self, runs: Sequence[tuple[Method, Work]], device: torch.device) -> None:
        method = runs[0][0]
        x = runs[0][1].epoch.parts[0].samples.x[:2]
        self.works = [work for _, work in runs]
        self.stacked = len(runs) > 1 and stacks_well(method, x)
        groups = [self.works] if self.stacked else [[work] for work in self.works]
        self._units = []
        for k, group in enumerate(groups):
            stream = Stream(device, len(groups))
            with stream.turn():
                steps = CapturedTask(runs[k][0], group, stacked=self.stacked)
            self._units.append((stream, steps, group))

    def epoch(self) -> None:
        """One epoch of every run."""
        going: list[tuple[Stream, Generator[None, None, list[Trained]]]] = [
            (stream, steps.train(group)) for stream, steps, group in self._units
        ]
        while going:
            for each in list(going):
                stream, training = each
                with stream.turn():
                    try:
                        next(training)
                    except StopIteration:
                        going.remove(each)


def timed(work: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measured(net: Net, method: Method, runs: int, epochs: int, device: torch.device) -> Any:
    """Milliseconds per run-step, and seconds until the first epoch is through."""
    made: list[Together] = []
    settle_libraries(sum(p.numel() for p in net.make().parameters()), device)

    def make() -> None:
        made.append(Together([begun(net, method, seed, device) for seed in range(runs)], device))
        made[0].epoch()

    first = timed(make, device)
    times = [timed(made[0].epoch, device) for _ in range(epochs)]
    return {
        "ms": round(1e3 * statistics.median(times) / (net.steps * runs), 4),
        "first epoch, s": round(first, 2),
        "stacked": made[0].stacked,
    }


def yardstick(net: Net, epochs: int, device: torch.device) -> float:
    """The dense form, one run, step by step, by torch's own kernels."""
    some = replace(net, steps=min(net.steps, 20))
    method, work = begun(some, Dense(no_scaling=net.no_scaling), 0, device)
    once = partial(train_epoch, method, work)
    with patch("trgp.engine.network.own_kernels", nullcontext):
        once()
        times = [timed(once, device) for _ in range(epochs)]
    return round(1e3 * statistics.median(times) / some.steps, 3)


def bases(net: Net, device: torch.device) -> dict[str, float]:
    """Seconds for a task's bases and for the choice of its trust region, warm."""
    method, work = begun(net, TRGPMethod(epsilon=0.0, no_scaling=net.no_scaling), 0, device)
    part = work.epoch.parts[0]
    network = method.network
    state = {"memory": work.state["memory"]}
    ctx = Context(
        network, TASK, part.head, part.samples, network.initial_params(), state, net.batch, 0, 10
    )
    ended = replace(ctx, params=work.params, state=work.state)
    found = {}
    phases: dict[str, Callable[[], object]] = {
        "selection, s": lambda: method.begin_task(ctx),
        "bases, s": lambda: method.end_task(ended),
    }
    for name, once in phases.items():
        once()
        found[name] = round(statistics.median(timed(once, device) for _ in range(3)), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--runs", type=int, default=5, help="that learn together")
    parser.add_argument("--epochs", type=int, default=5, help="the median of so many is told")
    parser.add_argument("--out", type=Path, help="a JSON file, beside what is printed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the engine captures its steps on a GPU, and this machine has none")
    device = torch.device("cuda")
    rows: dict[str, Any] = {}
    for name in args.nets:
        with repeatable(device):
            net = NETS[name]
            row: dict[str, Any] = {"published": net.published, "target": net.target}
            for method_name, method in methods(net).items():
                for runs in dict.fromkeys((args.runs, 1)):
                    found = measured(net, method, runs, args.epochs, device)
                    row[f"{method_name}, {runs}"] = found
                    print(f"{name:16} {method_name:13} {runs} runs: {found}", flush=True)
            row["dense"] = yardstick(net, args.epochs, device)
            row |= bases(net, device)
            together = {m: row[f"{m}, {args.runs}"]["ms"] for m in methods(net)}
            row["ratio to SGD"] = {m: round(v / together["SGD"], 3) for m, v in together.items()}
            rows[name] = row
            print(f"{name:16} dense {row['dense']} ms, {row['ratio to SGD']}, ", end="")
            print(f"bases {row['bases, s']} s, selection {row['selection, s']} s", flush=True)
    if args.out:
        content = {
            "device": torch.cuda.get_device_name(device),
            "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "runs": args.runs,
            "nets": rows,
        }
        write_text(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
