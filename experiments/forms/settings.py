"""The cells of this experiment: forms, benchmarks, networks, rates to choose from, options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trgp.data import NORMALISATION, load, to_tensors
from trgp.models import MLP, AlexNet

from trgp.benchmarks.common import Options, Request, Task, class_tasks, permuted_tasks
from trgp.benchmarks.digits import permuted

SEARCH_SEED = 100
WEIGHT_DECAY = 0.01  # AdamW's default; SGD has none
# Under SGD "paper" is the same computation as "Q".
FORMS = {
    "adamw": ("gpm", "q", "paper", "range", "union", "full"),
    "sgd": ("gpm", "paper", "range", "union", "full"),
}
SCALE_RATES = {"q": (1.0, 0.1), "paper": (1.0, 0.1)}  # of the others no rate of Q is left


class Cell(NamedTuple):
    """One run; the search's are measured on validation data, the others on test data."""

    benchmark: str
    optimizer: str
    form: str
    lr: float
    scale_rate: float
    seed: int


def narrow_alexnet(heads: int, classes: int, part: int = 4) -> AlexNet:
    """The package's AlexNet at a part of its widths."""
    net = AlexNet(heads, classes)
    for name, module in list(net.named_children()):
        if isinstance(module, nn.Conv2d):
            inputs = 3 if module.in_channels == 3 else module.in_channels // part
            size = module.kernel_size[0]
            setattr(net, name, nn.Conv2d(inputs, module.out_channels // part, size, bias=False))
        elif isinstance(module, nn.Linear):
            inputs, outputs = module.in_features // part, module.out_features // part
            setattr(net, name, nn.Linear(inputs, outputs, bias=False))
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            norm = type(module)(module.num_features // part, track_running_stats=False)
            setattr(net, name, norm)
    width = net.fc2.out_features
    net.heads = nn.ModuleList(nn.Linear(width, classes, bias=False) for _ in range(heads))
    return net


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        moved: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + moved


class ViT(nn.Module):
    """A vision transformer for images of 3x32x32 in patches of 4x4, with a head per task."""

    def __init__(
        self, heads: int, classes: int, width: int = 128, depth: int = 6, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn((32 // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, classes, bias=False) for _ in range(heads))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        """The logits of one head."""
        x = self.blocks(self.patches(x).flatten(2).mT + self.position)
        logits: Tensor = self.heads[head](self.norm(x).mean(1))
        return logits


@dataclass(frozen=True)
class Setting:
    """A benchmark as it is run here."""

    tasks: Callable[[Path | None, int, str], Sequence[Task]]  # of a folder, a seed, a device
    network: Callable[[], nn.Module]
    batch: int
    epochs: int
    rates: Mapping[str, tuple[float, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the learner
    seeds: int = 3
    large: bool = False  # whether it runs on the GPU, where there is one
    separate_heads: bool = False


_images = cache(load)  # to unpack a set takes seconds


def digits_tasks(data: Path | None, seed: int, device: str) -> Sequence[Task]:
    return permuted(Request("permuted-digits", seed, 6, None, device), Options()).tasks


def _pmnist(data: Path | None, seed: int, device: str) -> Sequence[Task]:
    images, norm = _images("mnist", data), NORMALISATION["mnist"]
    train = to_tensors(images.train_images[:8000], images.train_labels[:8000], device, norm)
    test = to_tensors(images.test_images, images.test_labels, device, norm)
    train, valid = train.subset(slice(6000)), train.subset(slice(6000, None))
    return permuted_tasks(train, valid, test, 10, 5, seed)


def _cifar(data: Path | None, seed: int, device: str) -> Sequence[Task]:
    """Five tasks of ten classes with 252 train, 28 validation and 100 test images each."""
    images, norm = _images("cifar100", data), NORMALISATION["cifar100"]
    labels = images.train_labels
    first = np.sort(np.concatenate([np.flatnonzero(labels == c)[:280] for c in range(50)]))
    train = to_tensors(images.train_images[first], labels[first], device, norm)
    test = to_tensors(images.test_images, images.test_labels, device, norm)
    groups = [range(10 * t, 10 * t + 10) for t in range(5)]
    return class_tasks(train, test, groups, 10, seed)


def _growing(layer: str, task: Any) -> float:
    return 0.97 + 0.003 * float(task)


_CIFAR: dict[str, Any] = {
    "tasks": _cifar,
    "epochs": 8,
    "options": {"threshold": _growing, "memory_samples": 500, "exclude": ["heads.*"]},
    "large": True,
    "separate_heads": True,
}
BENCHMARKS = {
    "digits": Setting(
        digits_tasks,
        lambda: MLP(64, (100, 100), 10),
        batch=32,
        epochs=10,
        seeds=5,
        rates={"adamw": (0.001, 0.003, 0.01, 0.03), "sgd": (0.003, 0.01, 0.03, 0.1)},
    ),
    "pmnist": Setting(
        _pmnist,
        MLP,
        batch=10,
        epochs=1,
        seeds=5,
        rates={"adamw": (0.0003, 0.001, 0.003, 0.01), "sgd": (0.001, 0.003, 0.01, 0.03)},
        options={"threshold": {"layers.0": 0.95, "*": 0.99}},
    ),
    "cifar": Setting(
        **_CIFAR,
        network=lambda: narrow_alexnet(5, 10),
        batch=64,
        rates={"adamw": (0.0003, 0.001, 0.003, 0.01), "sgd": (0.01, 0.03, 0.1, 0.3)},
    ),
    "vit": Setting(
        **_CIFAR,
        network=lambda: ViT(5, 10),
        batch=128,
        rates={"adamw": (0.0003, 0.001, 0.003, 0.01), "sgd": (0.01, 0.03, 0.1, 0.3)},
    ),
}
