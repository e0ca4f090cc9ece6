"""Input sizes of the layers of the papers' networks, which results do not store."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import nn

from ..benchmarks.models import MLP, AlexNet, LeNet, ResNet18
from ..results.result import Result

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "pmnist": MLP,
    "split-cifar100": AlexNet,
    "cifar100-superclass": LeNet,
    "five-datasets": ResNet18,
    "split-miniimagenet": lambda: ResNet18(image_size=84, stride=2),
    "permuted-digits": lambda: MLP(64),
    "split-digits": lambda: MLP(64),
}
"""Network per benchmark; the number of heads does not matter, since all have the same inputs."""


def widths(run: Result) -> Mapping[str, int]:
    """Return inputs per layer (per patch for a convolution); empty for a user's own network."""
    own = run.config.get("model") is not None
    return {} if own or run.benchmark not in NETWORKS else _of(run.benchmark)


@cache
def _of(benchmark: str) -> Mapping[str, int]:
    with torch.device("meta"):  # shapes only: nothing is allocated or drawn at random
        network = NETWORKS[benchmark]()
    return {
        name: module.weight.shape[1:].numel()
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    }
