"""The papers' benchmarks and two small ones as sequences of tasks, with the paper's results."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from ..lookup import imported, meant
from ..options import check_count
from ..types import PathLike
from . import (
    cifar100_superclass,
    digits,
    five_datasets,
    own,
    pmnist,
    split_cifar100,
    split_miniimagenet,
)
from .common import Benchmark, Options, Preset, Published, Request, Task
from .own import from_tensors

__all__ = [
    "NAMES",
    "PAPER",
    "PAPER_DATA",
    "Benchmark",
    "Entry",
    "Options",
    "Preset",
    "Published",
    "Task",
    "entry",
    "from_tensors",
    "load",
]


class Entry(NamedTuple):
    """The facts about a benchmark that need no data."""

    make: Callable[..., Benchmark]
    tasks: int
    presets: Mapping[str, Preset]
    paper: Mapping[str, Published] = {}
    options: type[Options] = Options
    separate_heads: bool = True
    """Whether every task has its own head, as in the loaded `Benchmark`."""

    @property
    def says(self) -> str:
        """The first line of the benchmark's description."""
        return inspect.getdoc(self.make).partition("\n")[0]  # type: ignore[union-attr]


_ENTRIES = {
    "pmnist": Entry(pmnist.make, pmnist.TASKS, pmnist.PRESETS, pmnist.PAPER, separate_heads=False),
    "split-cifar100": Entry(
        split_cifar100.make, split_cifar100.TASKS, split_cifar100.PRESETS, split_cifar100.PAPER
    ),
    "cifar100-superclass": Entry(
        cifar100_superclass.make,
        cifar100_superclass.TASKS,
        cifar100_superclass.PRESETS,
        cifar100_superclass.PAPER,
        cifar100_superclass.Options,
    ),
    "five-datasets": Entry(
        five_datasets.make,
        five_datasets.TASKS,
        five_datasets.PRESETS,
        five_datasets.PAPER,
        five_datasets.Options,
    ),
    "split-miniimagenet": Entry(
        split_miniimagenet.make,
        split_miniimagenet.TASKS,
        split_miniimagenet.PRESETS,
        split_miniimagenet.PAPER,
        split_miniimagenet.Options,
    ),
    "permuted-digits": Entry(
        digits.permuted, digits.PERMUTED_TASKS, digits.PERMUTED_PRESETS, separate_heads=False
    ),
    "split-digits": Entry(digits.split, digits.SPLIT_TASKS, digits.SPLIT_PRESETS),
}

NAMES = tuple(_ENTRIES)
PAPER = {name: entry.paper for name, entry in _ENTRIES.items() if entry.paper}
"""The TRGP paper's results by benchmark and method, in per cent.

Results on cifar100-superclass use scrambled pixels, those on five-datasets use MNIST in place of
Fashion-MNIST: options of these benchmarks reproduce both.
"""


PAPER_DATA = {
    "cifar100-superclass": "scrambled pixels, as in the preset official",
    "five-datasets": "MNIST in place of Fashion-MNIST, as in the preset official",
}
"""Benchmarks whose published results come from other data than the preset `paper` uses."""


def entry(name: str) -> Entry:
    """Find a benchmark by name, or a user's own by the path of its npz file or as tensors."""
    if name.endswith(".npz") or name == own.TENSORS:
        return Entry(own.from_file, 0, own.PRESETS)
    if name not in _ENTRIES:
        raise ValueError(f"There is no benchmark {name!r}; {meant(name, NAMES)}")
    return _ENTRIES[name]


def load(
    name: str,
    *,
    seed: int = 0,
    root: PathLike | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Benchmark:
    """Load a benchmark's tasks onto the device; the same seed gives the same bits anywhere.

    The seed changes the validation split (except on pmnist), the permutations of pmnist and
    permuted-digits, and the classes of split-miniimagenet's tasks. It never changes test images,
    nor the order of tasks or classes of any other benchmark. Initial weights and the order of
    batches depend on torch's own random state instead.

    Args:
        name: one of NAMES, or the path of an npz file.
        root: the folder of the image sets, as for `trgp.benchmarks.data.load`.
        options: `tasks`, to use only the first tasks (with fewer heads, if they are separate);
            `model`, another network as module:Class; and the quirks of the published data, off by
            default: `mnist_for_fashion` and `fixed_split` for five-datasets, `scrambled`,
            `fixed_split` and `order` ("A" to "E") for cifar100-superclass, `fixed_classes` for
            split-miniimagenet.
    """
    found = entry(name)
    chosen = _options(name, found, options)
    if chosen.tasks is None and not found.tasks:
        raise ValueError(f"The number of tasks of {name} is open; give --tasks.")
    count = found.tasks if chosen.tasks is None else check_count("tasks", chosen.tasks)
    if found.tasks and count > found.tasks:
        raise ValueError(f"{name} has {found.tasks} tasks, not {count}; give fewer with --tasks.")
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, not {seed!r}.")
    benchmark = found.make(Request(name, int(seed), count, root, device), chosen)
    if chosen.model is None:
        return benchmark
    return dataclasses.replace(benchmark, make_network=_network(chosen.model, benchmark))


def _options(name: str, found: Entry, given: Mapping[str, Any]) -> Options:
    known = {field.name: field for field in dataclasses.fields(found.options)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{name} has no option '{key}'; {meant(key, known)}")
        if isinstance(known[key].default, bool) and not isinstance(value, bool):
            raise ValueError(f"{key} must be True or False, not {value!r}.")
    return found.options(**given)


def _network(path: str, benchmark: Benchmark) -> Callable[[], nn.Module]:
    """Return a maker of a user's network, which passes `inputs`, `classes` and `heads` if taken."""
    make = imported(path, "model")
    if not callable(make):
        raise ValueError(f"{path} cannot be called; give a class or function that makes a network.")
    task = benchmark.tasks[0]
    sizes: dict[str, Any] = {
        "inputs": tuple(task.train.x.shape[1:]),
        "classes": max(t.classes for t in benchmark.tasks),
        "heads": len(benchmark.tasks) if benchmark.separate_heads else 1,
    }
    try:
        wanted = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # some classes written in C have no signature
        wanted = []
    given = {key: sizes[key] for key in wanted if key in sizes}

    def build() -> nn.Module:
        try:
            network = make(**given)
        except Exception as error:  # a user's network can fail in any way
            raise ValueError(
                f"{path} could not be made with {given}: {error}; only inputs, classes and "
                "heads are passed, so give every other parameter a default."
            ) from error
        if not isinstance(network, nn.Module):
            raise ValueError(f"{path} made a {type(network).__name__}; return an nn.Module.")
        return network

    return build
