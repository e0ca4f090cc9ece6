"""Count the operations on tensors in a training step, which on a GPU are about its kernels.

Needs no GPU. Networks without convolutions are stacked, five on each other, and share the step;
of the others it is the step of one. What computes nothing, as views, is not counted.
"""

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from engine import NETS, begun, methods
from torch.utils._python_dispatch import TorchDispatchMode

from trgp.engine.captured import CapturedTask
from trgp.engine.company import stacks_well

CPU = torch.device("cpu")
RUNS = 5
NOTHING = {"empty", "empty_like", "empty_strided", "promote_types", "detach", "_unsafe_view"}


class Counted(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NOTHING and not func.is_view:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def operations(net_name: str, method_name: str) -> Counter[str]:
    """Those of one step."""
    net = replace(NETS[net_name], steps=1)
    runs = [begun(net, methods(net)[method_name], seed, CPU) for seed in range(RUNS)]
    method, work = runs[0]
    stacked = stacks_well(method, work.epoch.parts[0].samples.x[:2])
    task = CapturedTask(method, [w for _, w in runs] if stacked else [work], stacked)
    method.train_mode(work.epoch.task)
    cut = work.epoch.rows()[0][0]
    task._body(work, cut, first=False)  # what is done once is done now
    task._step.zero_()
    counted = Counted()
    with counted:
        task._body(work, cut, first=False)
    return counted.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--top", type=int, default=6, help="operations to name")
    args = parser.parse_args()
    for net in args.nets:
        for method in methods(NETS[net]):
            count = operations(net, method)
            most = ", ".join(f"{n} {name}" for name, n in count.most_common(args.top))
            print(f"{net:16} {method:13} {count.total():5}: {most}", flush=True)


if __name__ == "__main__":
    main()
