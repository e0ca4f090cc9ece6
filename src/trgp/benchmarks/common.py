"""Shared parts of the benchmarks: tasks, presets, held-out samples, classes, permutations."""

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
    """One task: samples in three disjoint parts, with labels from 0 to classes - 1."""

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
    """A sequence of tasks, and the papers' network for it."""

    name: str
    tasks: tuple[Task, ...]
    make_network: Callable[[], nn.Module]
    """Makes a network of the right sizes on the CPU, initialised from torch's random state."""
    separate_heads: bool
    """Whether task t has its own head t; else every task uses head 0."""


class Published(NamedTuple):
    """A method's result as printed in the TRGP paper, in per cent; None if not printed."""

    acc: float
    std: float | None = None
    bwt: float | None = None


@dataclass(frozen=True)
class Options:
    """Choose tasks, network and data of the benchmark."""

    tasks: int | None = None
    """Number of tasks, from the first on (None: all)."""
    model: str | None = None
    """Your own network, as module:Class or module:function (None: the papers' network)."""

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model must be a string such as module:Class, not {self.model!r}.")


@dataclass(frozen=True)
class Preset:
    """A benchmark's settings by field name; all other fields keep their defaults."""

    every: Mapping[str, Any]
    """Settings of training and data for all methods."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By method: its options, and training settings that override `every`."""

    def settings(self, method: str) -> dict[str, Any]:
        """All settings of one method."""
        return {**self.every, **self.methods.get(method, {})}


# Deviations of the published code from the paper that are common to all benchmarks; the fields of
# the methods explain each. Its GPM is that of the GPM paper's code.
GPM_QUIRKS: Mapping[str, Any] = {"first_task_short": True}
TRGP_QUIRKS: Mapping[str, Any] = {
    "first_task_short": True,
    "strongest_unprotected": True,
    "unscaled_inputs": True,
    "first_layer_gate": True,
}


@dataclass(frozen=True)
class Request:
    """The arguments that every benchmark takes."""

    name: str
    seed: int
    count: int
    """Number of tasks, from the first on."""
    root: PathLike | None
    device: torch.device | str

    def read(self, name: str, classes: int, *shapes: tuple[int, int, int]) -> ImageSet:
        """Load a set from the store; raise an error if it does not fit this benchmark."""
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
    """Split into train and validation part: the first `percent` of a seeded shuffle are held out.

    Without a seed nothing is shuffled. The shuffle equals scikit-learn's for the same seed, as in
    the published code.
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
    """Select the samples of some classes in their order; labels number the classes as given."""
    device = samples.y.device
    number = torch.full((max(int(samples.y.max()), *classes) + 1,), -1, device=device)
    number[list(classes)] = torch.arange(len(classes), device=device)
    y = number[samples.y]
    kept = (y >= 0).nonzero().squeeze(1)
    return Tensors(samples.x[kept], y[kept], samples.normalisation)


def class_tasks(
    train: Tensors, test: Tensors, groups: Sequence[Sequence[int]], percent: int, seed: int
) -> tuple[Task, ...]:
    """Make a task per group of classes, with `percent` of its train samples held out."""
    tasks = []
    for group in groups:
        kept, held = hold_out(of_classes(train, group), percent, seed)
        name = f"classes {', '.join(map(str, group))}"
        tasks.append(Task(name, len(group), kept, held, of_classes(test, group)))
    return tuple(tasks)


def permuted_tasks(
    train: Tensors, valid: Tensors, test: Tensors, classes: int, count: int, seed: int
) -> tuple[Task, ...]:
    """Make tasks of the same samples with differently permuted pixels, the first task included.

    As in the published code, the seed puts 0 to 9 in an order r, and task i is shuffled by the
    seed 100 r[i] + i. Every task stores a copy: uint8 is small, and a batch is then one gather.
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
