"""Grids of benchmarks, methods, presets, options and seeds, and the cells they are made of."""

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
    "The method needs a head for every task, but all of them share one; take another benchmark."
)
OTHERS = {*inspect.signature(run).parameters} - {"changes"}  # of a run, but no settings


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
        """Where it is kept."""
        config = self.config
        return run_folder(
            out, config.benchmark, config.method_name, config.preset, config.changed, self.seed
        )

    def __str__(self) -> str:
        return f"{described(self.config)}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """Every combination of what it lists, less those that cannot be."""

    benchmarks: Sequence[str]
    methods: Sequence[str]
    presets: Sequence[str] = ("paper",)
    seeds: int | Sequence[int] = 1
    """How many, from 0 on, or which."""
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By the name of a setting its values, each for all methods."""
    own: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """The same by method, for that alone."""

    @property
    def left_out(self) -> list[tuple[str, str]]:
        """Benchmarks and the methods that need a head for every task where there is but one."""
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
    """The cells of all grids, each once, every setting checked; seeds: in place of the grids'."""
    found: dict[Path, Cell] = {}
    for grid in grids:
        wanted = check_seeds(grid.seeds if seeds is None else seeds)
        for config in grid.configs():
            whole, _ = named(config, data_root)
            for seed in wanted:
                cell = Cell(whole, seed)
                found.setdefault(cell.folder(""), cell)
    if not found:
        raise ValueError(ONE_HEAD_ONLY)  # or there would be some
    return list(found.values())


def described(config: Config) -> str:
    """A configuration in words."""
    changes = _changes(config)
    settings = f", {layout.settings(changes)}" if changes else ""
    return f"{config.method_name} on {config.benchmark}, preset {config.preset}{settings}"


def _changes(config: Config) -> dict[str, Any]:
    """What was changed by name; checksums of a user's own files nobody types."""
    return {key: value for key, value in config.changed.items() if not key.endswith("_source")}


def _configured(benchmark: str, method: str, preset: str, settings: Mapping[str, Any]) -> Config:
    for key in settings:
        if key in OTHERS:
            raise ValueError(
                f"'{key}' is no setting of {method} or of its training and data; leave it out of "
                "the options."
            )
    usual = configure(benchmark, method, preset).settings
    given = {key: _like(usual.get(key), value) for key, value in settings.items()}
    return configure(benchmark, method, preset, **given)


def _like(usual: Any, value: Any) -> Any:
    """A whole number as a fraction where the field has those: 1 and 1.0 are then one cell."""
    if isinstance(usual, (list, tuple)):
        first = usual[0] if usual else None
        several = isinstance(value, (list, tuple))
        return type(usual)(_like(first, v) for v in value) if several else _like(first, value)
    if isinstance(usual, float) and type(value) is int:
        with suppress(OverflowError):  # too large for any field, which then says so
            return float(value)
    return value
