"""The available sets, and the sets that each benchmark lacks."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...types import PathLike
from .store import SETS, data_root

BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "pmnist": ("mnist",),
    "split-cifar100": ("cifar100",),
    "cifar100-superclass": ("cifar100",),
    "five-datasets": ("cifar10", "mnist", "svhn", "fashion_mnist", "notmnist"),
    "split-miniimagenet": ("miniimagenet",),
    # Made from scikit-learn's data.
    "permuted-digits": (),
    "split-digits": (),
}


@dataclass(frozen=True)
class Catalogue:
    """The sets under a root."""

    root: Path
    present: tuple[str, ...]
    """Known sets whose file looks complete; only `load` reads all of it."""
    damaged: tuple[str, ...]
    """Known sets whose file is no zip archive, or a truncated one."""
    others: tuple[str, ...]
    """Other npz files: the user's own sets."""
    missing: Mapping[str, tuple[str, ...]]
    """By benchmark: the sets that it lacks, in the order of its tasks."""


def present(root: PathLike | None = None) -> Catalogue:
    """List the sets under the root without reading the images."""
    folder = data_root(root)
    there = {path.stem: path for path in sorted(folder.glob("*.npz")) if path.is_file()}
    whole = [name for name in SETS if name in there and zipfile.is_zipfile(there[name])]
    return Catalogue(
        root=folder,
        present=tuple(whole),
        damaged=tuple(name for name in SETS if name in there and name not in whole),
        others=tuple(name for name in there if name not in SETS and not name.startswith(".")),
        missing={
            benchmark: tuple(name for name in needed if name not in whole)
            for benchmark, needed in BENCHMARKS.items()
        },
    )
