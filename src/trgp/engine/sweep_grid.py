"""Grids of benchmarks, methods, presets, options and seeds, and the cells in them."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ..benchmarks import entry
from ..methods import find
from ..results import layout
from ..results.store import run_folder
from ..types import PathLike
from .config import Config, configure
from .given import named
from .run import check_seeds, run

ONE_HEAD_ONLY = (
    "The method needs a head for every task, but all tasks share one; use another benchmark."
)
OTHERS = {*inspect.signature(run).parameters} - {"changes"}  # of `run`, but no settings


@dataclass(frozen=True, eq=False)
class Cell:
    """One configuration from one seed."""

    config: Config
    seed: int

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that differ from the preset's."""
        return _changes(self.config)

    def folder(self, out: PathLike) -> Path:
        """Return the folder of its result."""
        config = self.config
        return run_folder(
            out, config.benchmark, config.method_name, config.preset, config.changed, self.seed
        )

    def __str__(self) -> str:
        return f"{described(self.config)}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """Every possible combination of its lists."""

    benchmarks: Sequence[str]
    methods: Sequence[str]
    presets: Sequence[str] = ("paper",)
    seeds: int | Sequence[int] = 1
    """A count, from seed 0 on, or the seeds."""
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of each setting by its name, for all methods."""
    own: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """Values of settings for single methods, by method."""

    @property
    def left_out(self) -> list[tuple[str, str]]:
        """Pairs of a benchmark with a single head and a method that needs one per task."""
        return [
            (benchmark, method)
            for benchmark, method in product(self.benchmarks, self.methods)
            if not entry(benchmark).separate_heads and find(method).about.several_heads
        ]

    def configs(self) -> Iterator[Config]:
        without = self.left_out
        for benchmark, method, preset in product(self.benchmarks, self.methods, self.presets):
            if (benchmark, method) not in without:
                options = {**self.options, **self.own.get(method, {})}
                for values in product(*options.values()):
                    chosen = dict(zip(options, values, strict=True))
                    yield _configured(benchmark, method, preset, chosen)


def cells(
    grids: Iterable[Grid],
    seeds: int | Sequence[int] | None = None,
    data_root: PathLike | None = None,
) -> list[Cell]:
    """List the cells of all grids once, with checked settings; `seeds` replaces the grids'."""
    found: dict[Path, Cell] = {}
    for grid in grids:
        wanted = check_seeds(grid.seeds if seeds is None else seeds)
        for config in grid.configs():
            whole, _ = named(config, data_root)
            for seed in wanted:
                cell = Cell(whole, seed)
                found.setdefault(cell.folder(""), cell)
    if not found:
        raise ValueError(ONE_HEAD_ONLY)  # the only reason for no cells
    return list(found.values())


def described(config: Config) -> str:
    """Describe a configuration in words."""
    changes = _changes(config)
    settings = f", {layout.settings(changes)}" if changes else ""
    return f"{config.method_name} on {config.benchmark}, preset {config.preset}{settings}"


def _changes(config: Config) -> dict[str, Any]:
    """Return the settings that a user changed, without checksums of the user's own files."""
    return {key: value for key, value in config.changed.items() if not key.endswith("_source")}


def _configured(benchmark: str, method: str, preset: str, settings: Mapping[str, Any]) -> Config:
    for key in settings:
        if key in OTHERS:
            raise ValueError(
                f"'{key}' is not a setting of {method}, its training or its data; leave it out of "
                "the options."
            )
    usual = configure(benchmark, method, preset).settings
    given = {key: _like(usual.get(key), value) for key, value in settings.items()}
    return configure(benchmark, method, preset, **given)


def _like(usual: Any, value: Any) -> Any:
    """Convert a whole number for a float field, so that 1 and 1.0 are one cell."""
    if isinstance(usual, (list, tuple)):
        first = usual[0] if usual else None
        several = isinstance(value, (list, tuple))
        return type(usual)(_like(first, v) for v in value) if several else _like(first, value)
    if isinstance(usual, float) and type(value) is int:
        with suppress(OverflowError):  # too large for any field, whose check reports it
            return float(value)
    return value
