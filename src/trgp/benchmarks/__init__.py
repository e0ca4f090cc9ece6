"""The papers' benchmarks and two small ones as sequences of tasks, with the paper's results."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..data.store import PathLike
from ..options import check_count
from . import (
    cifar100_superclass,
    digits,
    five_datasets,
    pmnist,
    split_cifar100,
    split_miniimagenet,
)
from .common import Benchmark, Published, Request, Task

__all__ = ["NAMES", "PAPER", "Benchmark", "Published", "Task", "load"]


class _Entry(NamedTuple):
    make: Callable[..., Benchmark]
    tasks: int
    paper: Mapping[str, Published]


_ENTRIES = {
    name: _Entry(module.make, module.TASKS, module.PAPER)
    for name, module in {
        "pmnist": pmnist,
        "split-cifar100": split_cifar100,
        "cifar100-superclass": cifar100_superclass,
        "five-datasets": five_datasets,
        "split-miniimagenet": split_miniimagenet,
    }.items()
} | {
    "permuted-digits": _Entry(digits.permuted, digits.PERMUTED_TASKS, {}),
    "split-digits": _Entry(digits.split, digits.SPLIT_TASKS, {}),
}

NAMES = tuple(_ENTRIES)
PAPER = {name: entry.paper for name, entry in _ENTRIES.items() if entry.paper}
"""The TRGP paper's results by benchmark and method, in per cent.

Those on cifar100-superclass are on scrambled pixels, those on five-datasets with MNIST in place
of Fashion-MNIST: the options of these benchmarks restore both.
"""


def load(
    name: str,
    *,
    seed: int = 0,
    tasks: int | None = None,
    root: PathLike | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Benchmark:
    """A benchmark's tasks on the device, equal bit for bit wherever the seed is.

    The seed changes the validation split (not of pmnist), the permutations of pmnist and
    permuted-digits, and the classes of split-miniimagenet's tasks. It changes no test image, and
    in no other benchmark the order of tasks or classes. Initial weights and the order of batches
    are none of its business: torch's own random state decides them.

    tasks: only so many, from the first on; the network then has fewer heads, if they are separate.
    root: the folder of the image sets, as for `trgp.data.load`.
    options: quirks of the published data, off unless given: `mnist_for_fashion` and `fixed_split`
        for five-datasets, `scrambled`, `fixed_split` and `order` ("A" to "E") for
        cifar100-superclass.
    """
    if name not in _ENTRIES:
        raise ValueError(f"There is no benchmark {name!r}; {_meant(name, NAMES)}")
    entry = _ENTRIES[name]
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(entry.make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for key, value in options.items():
        if key not in known:
            hint = _meant(key, tuple(known)) if known else "it has none."
            raise ValueError(f"{name} has no option '{key}'; {hint}")
        if isinstance(known[key], bool) and not isinstance(value, bool):
            raise ValueError(f"{key} must be True or False, not {value!r}.")
    count = entry.tasks if tasks is None else check_count("tasks", tasks)
    if count > entry.tasks:
        raise ValueError(f"{name} has {entry.tasks} tasks; tasks={tasks} is too many.")
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, not {seed!r}.")
    return entry.make(Request(name, int(seed), count, root, device), **options)


def _meant(given: object, known: tuple[str, ...]) -> str:
    near = get_close_matches(str(given), known, 1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}."
