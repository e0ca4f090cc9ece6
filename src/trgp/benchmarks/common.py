"""What the benchmarks share: tasks, held-out samples, classes, permutations, a set's shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..types import PathLike
from .data import ImageSet, Tensors, data_root
from .data import load as load_set


@dataclass(frozen=True, eq=False)
class Task:
    """One task: its samples in three disjoint parts, with labels from 0 to classes - 1."""

    name: str
    classes: int
    train: Tensors
    valid: Tensors
    test: Tensors

    def __post_init__(self) -> None:
        for part in ("train", "valid", "test"):
            if not len(getattr(self, part)):
                raise ValueError(
                    f"The task '{self.name}' has no sample for its {part} part; give its classes "
                    "more images."
                )


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A sequence of tasks and the network that the papers learn it with."""

    name: str
    tasks: tuple[Task, ...]
    make_network: Callable[[], nn.Module]
    """A new network of the right sizes on the CPU, initialised from torch's random state."""
    separate_heads: bool
    """Whether task t has the head t of its own; else every task uses head 0."""


class Published(NamedTuple):
    """A method's result as the TRGP paper prints it, in per cent; None where it prints none."""

    acc: float
    std: float | None = None
    bwt: float | None = None


@dataclass(frozen=True)
class Options:
    """What can be chosen about a benchmark."""

    tasks: int | None = None
    """Only so many tasks, from the first on (None: all)."""
    model: str | None = None
    """Another network, as module:Class or module:function (None: the papers' own)."""

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model must be a text as module:Class, not {self.model!r}.")


@dataclass(frozen=True)
class Preset:
    """A benchmark's settings by the names of their fields; everything else has its default."""

    every: Mapping[str, Any]
    """Of training and data, for all methods."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By method its own options, and what it trains with instead."""

    def settings(self, method: str) -> dict[str, Any]:
        """All that is set for one method."""
        return {**self.every, **self.methods.get(method, {})}


# The published code's ways that are not the paper's, alike on every benchmark; see the fields of
# the methods for what each is. Its GPM is that of the GPM paper's code.
GPM_QUIRKS: Mapping[str, Any] = {"first_task_short": True}
TRGP_QUIRKS: Mapping[str, Any] = {
    "first_task_short": True,
    "strongest_unprotected": True,
    "unscaled_inputs": True,
    "first_layer_gate": True,
}


@dataclass(frozen=True)
class Request:
    """What is asked of every benchmark alike."""

    name: str
    seed: int
    count: int
    """How many tasks, from the first on."""
    root: PathLike | None
    device: torch.device | str

    def read(self, name: str, classes: int, *shapes: tuple[int, int, int]) -> ImageSet:
        """A set from the store, refused where it is not of the kind that this benchmark needs."""
        images = load_set(name, self.root)
        shape = images.train_images.shape[1:]
        if images.classes != classes or shape not in shapes:
            needed = " or ".join(" x ".join(map(str, allowed)) for allowed in shapes)
            raise ValueError(
                f"{name}.npz in {data_root(self.root)} holds {images.classes} classes of "
                f"{' x '.join(map(str, shape))} images, but {self.name} needs {classes} of "
                f"{needed}; put the right file there, or give another root."
            )
        return images


def hold_out(samples: Tensors, percent: int, seed: int | None) -> tuple[Tensors, Tensors]:
    """Train and validation part: the first so many per cent of a seeded shuffle are held out.

    Without a seed nothing is shuffled. The shuffle is that of scikit-learn for the same seed,
    which the published code uses.
    """
    n = len(samples)
    order = torch.arange(n) if seed is None else shuffled(n, seed)
    order = order.to(samples.y.device)
    held = n * percent // 100
    return samples.subset(order[held:]), samples.subset(order[:held])


def shuffled(n: int, seed: int) -> Tensor:
    """0 to n - 1 in a seeded order, the same on every machine."""
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))


def of_classes(samples: Tensors, classes: Sequence[int]) -> Tensors:
    """The samples of some classes in the order they have, labels numbered as the classes come."""
    device = samples.y.device
    number = torch.full((max(int(samples.y.max()), *classes) + 1,), -1, device=device)
    number[list(classes)] = torch.arange(len(classes), device=device)
    y = number[samples.y]
    kept = (y >= 0).nonzero().squeeze(1)
    return Tensors(samples.x[kept], y[kept], samples.normalisation)


def class_tasks(
    train: Tensors, test: Tensors, groups: Sequence[Sequence[int]], percent: int, seed: int
) -> tuple[Task, ...]:
    """A task for every group of classes, so many per cent of its train samples held out."""
    tasks = []
    for group in groups:
        kept, held = hold_out(of_classes(train, group), percent, seed)
        name = f"classes {', '.join(map(str, group))}"
        tasks.append(Task(name, len(group), kept, held, of_classes(test, group)))
    return tuple(tasks)


def permuted_tasks(
    train: Tensors, valid: Tensors, test: Tensors, classes: int, count: int, seed: int
) -> tuple[Task, ...]:
    """The same samples, their pixels in another order in every task, the first one included.

    As in the published code the seed puts 0 to 9 in an order r, and task i is shuffled by the
    seed 100 r[i] + i. Every task holds a copy: uint8 is small, and a batch is then one gather.
    """
    tasks = []
    for i, r in enumerate(shuffled(10, seed)[:count].tolist()):
        order = shuffled(train.x[0].numel(), 100 * r + i).to(train.x.device)
        parts = [
            Tensors(part.x.flatten(1)[:, order].view_as(part.x), part.y, part.normalisation)
            for part in (train, valid, test)
        ]
        tasks.append(Task(f"permutation {100 * r + i}", classes, *parts))
    return tuple(tasks)
