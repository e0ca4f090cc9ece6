"""Time our kernels on a GPU against torch's: every convolution, norm and pool of the networks.

Forward and backward of a layer at batch 64, many calls in one CUDA graph, so that neither Python
nor the gaps between launches count. Torch's are those that the engine would use: channels first,
deterministic, convolutions in TF32 as far as cuDNN chooses to.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from engine import NETS
from torch import Tensor, nn

from trgp.benchmarks.models.lenet import ResponseNorm
from trgp.engine.machine import repeatable
from trgp.fast.kernels import own_kernels
from trgp.files import write_text

CALLS = 20
KINDS = (nn.Conv2d, nn.BatchNorm2d, nn.BatchNorm1d, nn.MaxPool2d, ResponseNorm)


def layers(net_name: str, device: torch.device) -> dict[str, tuple[nn.Module, torch.Size]]:
    """The network's layers of these kinds that differ in shape, and the shapes of their inputs."""
    net = NETS[net_name]
    found: dict[str, tuple[nn.Module, torch.Size]] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0]
        found.setdefault(f"{type(module).__name__} {tuple(x.shape[1:])} to "
                         f"{tuple(output.shape[1:])}", (module, x.shape))  # fmt: skip

    network = net.make().to(device)
    for module in network.modules():
        if isinstance(module, KINDS):
            module.register_forward_hook(note)
    network(torch.randn(net.batch, *net.shape, device=device))
    return found


def microseconds(work: Callable[[], object]) -> float:
    """Of one call, the median of five replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                work()
        graph.replay()
        times: list[float] = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    spent: float = statistics.median(times)
    return round(1e3 * spent / CALLS, 1)


def timed(
    layer: nn.Module, x: Tensor, kernels: Callable[[], AbstractContextManager[object]]
) -> float:
    """Forward and backward, in the layout that the kernels in use leave maps in."""
    x.requires_grad_(x.shape[1] > 3)  # images need no gradient
    wanted = [*([x] if x.requires_grad else []), *layer.parameters()]
    with kernels():
        along = torch.randn_like(layer(x))

    def work() -> None:
        with kernels():
            y = layer(x)
        torch.autograd.grad(y, wanted, along)

    return microseconds(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=["AlexNet", "LeNet", "ResNet18, 32x32"])
    parser.add_argument("--out", type=Path, help="a JSON file, beside what is printed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU, and this machine has none")
    device = torch.device("cuda")
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with repeatable(device):
        for net in args.nets:
            for name, (layer, shape) in layers(net, device).items():
                x = torch.randn(shape, device=device)
                torchs = timed(layer, x, nullcontext)
                if x.dim() == 4 and x.shape[1] > 3:
                    x = x.detach().contiguous(memory_format=torch.channels_last)
                own = timed(layer, x.detach(), lambda: own_kernels(device))
                rows.setdefault(net, {})[name] = {"torch, us": torchs, "own, us": own}
                print(f"{net:16} {name:48} torch {torchs:6.1f} us, own {own:6.1f} us", flush=True)
    if args.out:
        content = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "nets": rows,
        }
        write_text(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
