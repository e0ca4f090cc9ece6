"""The kernels of a training step on a GPU, by the time they take: where the engine's time goes.

Networks that are stacked share the step, five on each other; of the others it is the step of one.
"""

import argparse
from collections import Counter

import torch
from engine import NETS, begun, methods
from torch.profiler import ProfilerActivity, profile

from trgp.engine.captured import CapturedTask
from trgp.engine.company import stacks_well
from trgp.engine.machine import repeatable, settle_libraries
from trgp.engine.stream import Stream

RUNS = 5


def kernels(net_name: str, method: str, device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel runs in a step, and for how many microseconds in all."""
    net = NETS[net_name]
    settle_libraries(sum(p.numel() for p in net.make().parameters()), device)
    bound, work = begun(net, methods(net)[method], 0, device)
    works = [work]
    stacked = stacks_well(bound, work.epoch.parts[0].samples.x[:2])
    if stacked:
        works += [begun(net, methods(net)[method], seed, device)[1] for seed in range(1, RUNS)]
    with Stream(device, 1).turn():
        task = CapturedTask(bound, works, stacked)
        bound.train_mode(work.epoch.task)
        cut = work.epoch.rows()[0][0]
        for _ in range(2):
            task._body(work, cut, first=False)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            task._body(work, cut, first=False)
            torch.cuda.synchronize()
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in found.events():
        if event.device_time:
            count[event.name] += 1
            spent[event.name] += round(event.device_time, 1)
    return count, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--methods", nargs="+", default=["SGD", "TRGP"])
    parser.add_argument("--top", type=int, default=12, help="kernels to name")
    args = parser.parse_args()
    device = torch.device("cuda")
    for name in args.nets:
        for method in args.methods:
            with repeatable(device):
                count, spent = kernels(name, method, device)
            print(f"{name}, {method}: {count.total()} kernels, {spent.total():.0f} us")
            for kernel, time in spent.most_common(args.top):
                print(f"{time:9.1f} us {count[kernel]:4} x  {kernel[:64]}")


if __name__ == "__main__":
    main()
