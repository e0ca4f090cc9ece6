"""Everything that determines a run, as frozen dataclasses: training, method and data."""

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Literal
from uuid import uuid4
from weakref import WeakKeyDictionary

from .. import benchmarks, methods
from ..benchmarks import Options
from ..lookup import imported, meant
from ..methods import Method
from ..options import check_count, check_number


@dataclass(frozen=True)
class Training:
    """Training of a task and evaluation of all tasks."""

    lr: float = 0.01
    """Learning rate of plain SGD."""
    batch: int = 64
    """Batch size. A final batch of one sample is merged into the previous one."""
    lr_decay: float = 1.0
    """Factor on the learning rate after every epoch of a task."""
    epochs: int = 50
    """Epochs per task (an upper bound if patience is set)."""
    patience: int = 0
    """Epochs without a better validation loss before the learning rate is cut; the best weights are
    restored at the end of the task. 0 disables both."""
    lr_factor: float = 2.0
    """Divisor of the learning rate when it is cut."""
    lr_min: float = 1e-5
    """A task ends when the learning rate is cut to less than this."""
    test_batch: int = 64
    """Batch size of validation and test. It changes accuracy only where BatchNorm uses the
    statistics of the current batch."""
    test_passes: int = 1
    """Passes over the shuffled test set that an accuracy is averaged over. More than one is useful
    only where BatchNorm uses the current batch."""
    redrawn_validation: bool = False
    """Quirk: validation batches are drawn anew in every epoch, because the published code shuffles
    all data that it evaluates. Where BatchNorm uses the current batch, this adds noise to the loss
    that decides when the learning rate is cut. No preset sets it."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of the network's own products while it trains, if the device supports it;
    projections, selection and evaluation are never rounded."""
    score_on: Literal["test", "validation"] = "test"
    """Data that the accuracy matrix is measured on; choose settings on validation data."""
    evaluate_unseen: bool = False
    """Also evaluate tasks before they are trained, to measure forward transfer (FWT)."""

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "test_batch", "test_passes"):
            check_count(name, getattr(self, name))
        if self.precision not in ("float32", "tf32", "bfloat16"):
            raise ValueError(
                f"precision must be float32, tf32 or bfloat16, not {self.precision!r}."
            )
        if self.score_on not in ("test", "validation"):
            raise ValueError(f"score_on must be test or validation, not {self.score_on!r}.")
        if self.patience != 0 or isinstance(self.patience, bool):
            check_count("patience", self.patience)
        for name, least in (("lr", 0.0), ("lr_decay", 0.0), ("lr_min", 0.0), ("lr_factor", 1.0)):
            check_number(name, getattr(self, name), above=least)
        if self.lr_decay > 1:
            raise ValueError(f"lr_decay must be at most 1, not {self.lr_decay!r}.")


@dataclass(frozen=True)
class Config:
    """One configuration; with a seed it determines a run."""

    benchmark: str
    method_name: str
    preset: str
    training: Training
    method: Method
    data: Options
    data_source: str | None = None
    """Checksum of a user's own data, because other data makes another configuration."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every field by name, with checksums of the sources of a user's own classes and data."""
        flat = {
            field.name: getattr(part, field.name)
            for part in (self.data, self.training, self.method)
            for field in dataclasses.fields(part)
        }
        own = {"model": self.data.model, "method": self.method_name}
        sources = {
            f"{key}_source": _source(path, key) for key, path in own.items() if path and ":" in path
        }
        if self.data_source is not None:
            sources["data_source"] = self.data_source
        return flat | sources

    @cached_property
    def stored(self) -> dict[str, Any]:
        """The settings as a result stores them."""
        return _as_json(self.settings)

    def is_of(self, stored: Mapping[str, Any]) -> bool:
        """Whether a stored result has these settings; one that it lacks counts as the default.

        A new setting must therefore change nothing by default: an old result does not name it.
        """
        parts = (self.data, self.training, self.method)
        return {**_defaults(*map(type, parts)), **stored} == self.stored

    @cached_property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from the preset's."""
        plain = configure(self.benchmark, self.method_name, self.preset).settings
        return {
            key: value
            for key, value in self.settings.items()
            if key.endswith("_source") or value != plain[key]
        }


@cache
def defaults(benchmark: str, method: str) -> Mapping[str, Any]:
    """Return the default settings by name, as results store them.

    Empty for a user's own method, whose module may be missing, and for a benchmark or method that
    only another version has.
    """
    if ":" in method:
        return {}
    try:
        return _defaults(Training, methods.find(method), benchmarks.entry(benchmark).options)
    except ValueError:
        return {}


def _defaults(*kinds: type[Any]) -> dict[str, Any]:
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    return _as_json({f.name: f.default for f in fields if f.default is not dataclasses.MISSING})


def configure(benchmark: str, method: str, preset: str = "paper", **changes: Any) -> Config:
    """Return a benchmark's preset for a method, with some settings changed by name."""
    entry = benchmarks.entry(benchmark)
    kind = methods.find(method)
    if preset not in entry.presets:
        raise ValueError(f"{benchmark} has no preset {preset!r}; {meant(preset, entry.presets)}")
    settings = entry.presets[preset].settings(method)
    kinds: dict[str, type[Any]] = {"training": Training, "method": kind, "data": entry.options}
    owner: dict[str, str] = {}
    for part, each in kinds.items():
        for field in dataclasses.fields(each):
            if field.name in owner:
                raise ValueError(
                    f"{method} has an option '{field.name}', which is also a training or data "
                    "setting; rename the option."
                )
            owner[field.name] = part
    for key in changes:
        if key not in owner:
            raise ValueError(
                f"There is no setting '{key}' for {method} on {benchmark}; {meant(key, owner)}"
            )
    if entry.tasks and changes.get("tasks") == entry.tasks:  # all tasks, which is the default
        changes = {**changes, "tasks": None}
    chosen: dict[str, dict[str, Any]] = {part: {} for part in kinds}
    for key, value in (settings | changes).items():
        chosen[owner[key]][key] = value
        if isinstance(getattr(kinds[owner[key]], key, None), bool) and not isinstance(value, bool):
            raise ValueError(f"{key} must be True or False, not {value!r}.")
    parts = {part: make(**chosen[part]) for part, make in kinds.items()}
    config = Config(benchmark, method, preset, **parts)
    for key, value in config.settings.items():
        if not _plain(value):
            raise ValueError(f"{key} is {value!r}, which a result cannot store; use plain values.")
    return config


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON writes and reads them."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _plain(value: object) -> bool:
    """Whether a value can be stored: a finite number, a text, a bool, None, or a list of them."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


_SOURCES: "WeakKeyDictionary[ModuleType, str]" = WeakKeyDictionary()


def _source(path: str, what: str) -> str:
    """Return a checksum of a user's module, because other code makes another configuration.

    The source is read at its first use: later changes of the file do not change what runs.
    """
    module = inspect.getmodule(imported(path, what))
    if module is None:
        return uuid4().hex[:16]
    if module not in _SOURCES:
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):
            text = uuid4().hex  # typed in: nothing shows that it is unchanged
        _SOURCES[module] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _SOURCES[module]
