"""Time a training step of each way to do TRGP, and the construction of a task's bases, on the CPU.

Synthetic data; two old tasks per layer, whose bases are random halves of the memory's columns. The
contenders take turns and medians are compared, so that whatever else the machine does hits all of
them alike. Before anything is timed, those that claim to do the same job are checked to do it.
"""

import argparse
import copy
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bases
import torch
from contenders import ALEXNET, CONTENDERS, EQUAL, MLP, Batch, Contender, Net, random_memory
from torch import nn

import trgp
from trgp.files import write_text

SHARES = (0.3, 0.7)
TURN_S = 0.05  # a turn repeats a quick step until it takes about this long


class Line(NamedTuple):
    """One measurement."""

    setting: str
    contender: str
    ms: float
    relative: float  # to the first contender of the setting


def race(setting: str, contenders: Mapping[str, Callable[[], object]], rounds: int) -> list[Line]:
    """Median milliseconds a call of every contender, taking turns."""
    print(f"timing {setting} ...", file=sys.stderr)
    repeats = {}
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(TURN_S / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    medians = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    first = next(iter(medians.values()))
    return [Line(setting, name, ms, ms / first) for name, ms in medians.items()]


def enter(net: Net, share: float, names: list[str], *, exact: bool) -> dict[str, Contender]:
    """The named contenders, all from the same weights; `exact` is float64 without dropout."""
    dtype = torch.float64 if exact else torch.float32
    torch.manual_seed(0)
    start = net.make().to(dtype)
    if exact:
        for module in start.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    olds = random_memory(start, share, seed=1)
    batch = make_batch(net, dtype, seed=2)
    return {name: CONTENDERS[name](copy.deepcopy(start), olds, batch) for name in names}


def make_batch(net: Net, dtype: torch.dtype, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(net.batch, *net.shape, generator=draw, dtype=dtype)
    return x, torch.randint(10, (net.batch,), generator=draw)


def check_equal(net: Net, share: float, steps: int) -> None:
    """Fail unless all forms of TRGP reach the same effective and shared weights."""
    contenders = enter(net, share, EQUAL, exact=True)
    for i in range(steps):
        batch = make_batch(net, torch.float64, seed=3 + i)
        for contender in contenders.values():
            contender.step(batch)
    (first, expected), *rest = ((name, c.weights()) for name, c in contenders.items())
    for name, found in rest:
        for layer, pair in expected.items():
            for kind, a, b in zip(("effective", "shared"), pair, found[layer], strict=True):
                error = float((a - b).detach().abs().max())
                if not error < 1e-9:
                    raise SystemExit(
                        f"{net.name}, memory {share:.0%}: the {kind} weights of {layer} differ by "
                        f"{error:.1e} between '{first}' and '{name}' after {steps} steps."
                    )


def time_steps(net: Net, share: float, rounds: int) -> list[Line]:
    contenders = enter(net, share, list(CONTENDERS), exact=False)
    batches = [make_batch(net, torch.float32, seed) for seed in range(8)]

    def training(contender: Contender) -> Callable[[], None]:
        turn = itertools.cycle(batches)
        return lambda: contender.step(next(turn))

    setting = f"{net.name}, batch {net.batch}, memory {share:.0%}"
    return race(setting, {name: training(c) for name, c in contenders.items()}, rounds)


def time_bases(rounds: int) -> list[Line]:
    lines = []
    for name, case in bases.cases(share=SHARES[0], seed=0):
        bases.check(name, case)
        n, N = case.layer.shape[2], case.layer.columns(case.site, case.x).shape[1]
        ways = {way: partial(build, case) for way, build in bases.WAYS.items()}
        lines += race(f"AlexNet bases, {name}, R {n} x {N}", ways, rounds)
    return lines


def show(lines: list[Line]) -> None:
    first = max(len(line.setting) for line in lines)
    second = max(len(line.contender) for line in lines)
    print(f"{'setting':{first}}  {'contender':{second}}  {'ms':>9}  relative")
    for setting, group in itertools.groupby(lines, lambda line: line.setting):
        for i, line in enumerate(group):
            print(f"{'' if i else setting:{first}}  {line.contender:{second}}", end="  ")
            print(f"{line.ms:9.3f}  {line.relative:7.2f}x")


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    models = info.read_text().partition("model name")[2] if info.exists() else ""
    return models.partition("\n")[0].lstrip("\t: ") or platform.processor()


def record(lines: list[Line], rounds: int) -> dict[str, Any]:
    return {
        "command": "bench/core.py " + " ".join(sys.argv[1:]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trgp": trgp.__version__,
        },
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "lines": [line._asdict() for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, the smaller memory only")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also store the record here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = 3 if args.quick else 7
    shares = SHARES[:1] if args.quick else SHARES
    lines: list[Line] = []
    for net in (MLP, ALEXNET):
        for share in shares:
            check_equal(net, share, steps=3)
            lines += time_steps(net, share, rounds)
    lines += time_bases(rounds)
    show(lines)
    if args.json:
        write_text(args.json, json.dumps(record(lines, rounds), indent=2) + "\n")


if __name__ == "__main__":
    main()
