"""The named sweeps."""

from collections.abc import Callable, Mapping
from typing import Any

from ...methods import METHODS
from ..config import configure
from ..sweep_grid import Grid

BOTH = ("pmnist", "split-cifar100")  # where the paper compares most methods
# Not a quirk: it changes figures only where BatchNorm uses the current batch, and there the presets
# have the same value.
SPEED = ("test_batch",)


def embedded() -> list[Grid]:
    """Every method on the two benchmarks that need no download."""
    return [Grid(("permuted-digits", "split-digits"), tuple(METHODS), seeds=5)]


def paper() -> list[Grid]:
    """The paper's tables, with GPM and TRGP also by the `official` preset.

    Growing networks are compared only on the superclasses.
    """
    growing = tuple(name for name, kind in METHODS.items() if kind.about.family == "growing")
    others = ("finetune", "single", "multitask", "owm", "ewc", "hat", "agem", "er", "lwf")
    presets = ("paper", "official")
    bounds = ("single", "multitask", "finetune")
    return [
        Grid(BOTH, ("gpm", "trgp"), presets, seeds=5),
        Grid(BOTH, others, seeds=3),
        Grid(("cifar100-superclass",), ("gpm", "trgp", *bounds, *growing), presets, seeds=3),
    ]


def quirks() -> list[Grid]:
    """TRGP with each quirk of the published code alone, and with all but one."""
    grids = []
    for benchmark in BOTH:
        paper, official = (_settings(benchmark, preset) for preset in ("paper", "official"))
        for name, value in official.items():
            if value != paper[name] and name not in SPEED:
                for preset, other in (("paper", value), ("official", paper[name])):
                    grids.append(
                        Grid((benchmark,), ("trgp",), (preset,), seeds=3, options={name: [other]})
                    )
    return grids


def ablation() -> list[Grid]:
    """TRGP with other trust regions."""
    varied: list[dict[str, Any]] = [
        {"epsilon": (0.2, 0.5, 0.7)},
        {"scope": ("task",)},
        {"top_k": (1, 2, 3, 4)},
    ]
    return [
        Grid((benchmark,), ("trgp",), seeds=seeds, options=options)
        for benchmark, seeds in (("split-cifar100", 3), ("five-datasets", 1))
        for options in varied
    ]


def _settings(benchmark: str, preset: str) -> dict[str, Any]:
    return configure(benchmark, "trgp", preset).settings


SWEEPS: Mapping[str, Callable[[], list[Grid]]] = {
    "embedded": embedded,
    "paper": paper,
    "quirks": quirks,
    "ablation": ablation,
}
