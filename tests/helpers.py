"""Small models, tasks and a training loop, for any test to import: `from helpers import ...`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trgp import GPM

Batch = tuple[Tensor, Tensor]


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers '0', '2', '4', ... of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for n, o in itertools.pairwise(sizes):
        layers += [nn.Linear(n, o, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ConvNet(nn.Module):
    """Plain, grouped and dilated convolutions with BatchNorm, for images of (16, 4, 4)."""

    def __init__(self, classes: int = 4, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.grouped = nn.Conv2d(width, width, 3, padding=1, stride=2, groups=2, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.dilated = nn.Conv2d(width, width, 2, padding=1, dilation=2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv(x)).relu()
        x = self.norm2(self.grouped(x)).relu()
        return self.head(self.dilated(x).relu().mean((2, 3)))


class Vit(nn.Module):
    """A vision transformer for images of (16, 4, 4): four patches and a class token."""

    def __init__(self, classes: int = 4, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(16, width, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class ResNet(nn.Module):
    """A residual block with a strided shortcut, for images of (16, 4, 4)."""

    def __init__(self, classes: int = 4, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(16, width, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(16, width, 1, stride=2, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)) + self.norm3(self.shortcut(x))
        return self.head(y.relu().mean((2, 3)))


class Tied(nn.Module):
    """One weight in two modules, each with its own bias, and one module called twice."""

    def __init__(self, inputs: int = 6, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).relu()
        return self.head(self.two(self.one(self.one(x).tanh()).tanh()).tanh())


class Cross(nn.Module):
    """An image (16, 4, 4) asks its own pixels: attention with a weight for each of its inputs."""

    def __init__(self, classes: int = 4, width: int = 32) -> None:
        super().__init__()
        self.ask = nn.Linear(16, width)
        self.values = nn.Linear(16, 24)
        self.attention = nn.MultiheadAttention(width, 4, kdim=16, vdim=24, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(2).mT
        query = self.ask(pixels.mean(1, keepdim=True))
        y, _ = self.attention(query, key=pixels, value=self.values(pixels), need_weights=False)
        return self.head(y[:, 0])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """A loss_fn for batches of (inputs, labels)."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """A loss_fn for batches of (inputs, targets)."""
    x, y = batch
    return F.mse_loss(model(x), y)


def classification(
    task: int,
    *shape: int,
    samples: int = 8,
    classes: int = 4,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A task of its own: random inputs of a shape (features or channels first), random labels.

    With a rank, the features (of every pixel) lie in that many random directions.
    """
    draw = torch.Generator().manual_seed(1000 + task)
    features, *pixels = shape
    x = torch.randn(samples, *pixels, features, generator=draw, dtype=dtype)
    if rank is not None:
        x = x[..., :rank] @ torch.randn(rank, features, generator=draw, dtype=dtype) / rank**0.5
    y = torch.arange(samples) % classes
    return x.movedim(-1, 1), y[torch.randperm(samples, generator=draw)]


def train(
    learner: GPM,
    batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    *,
    steps: int = 20,
    make: Callable[..., Optimizer] = torch.optim.SGD,
    **options: Any,
) -> None:
    """An ordinary training loop inside a task that has begun."""
    optimizer = learner.attach(make(learner.parameters(), **({"lr": 0.1} | options)))
    learner.model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss_fn(learner.model, batches[step % len(batches)]).backward()
        optimizer.step()


def learn(
    learner: GPM,
    task: int | str,
    batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    **options: Any,
) -> None:
    """A whole task: begin, `train` with these options, end."""
    learner.begin_task(task, batches, loss_fn)
    train(learner, batches, loss_fn, **options)
    learner.end_task(batches)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """The same to an absolute tolerance."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
