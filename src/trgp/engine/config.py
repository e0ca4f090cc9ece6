"""Everything a run is decided by, as frozen dataclasses: training, method and data."""

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
    """How a task is trained and every task evaluated."""

    lr: float = 0.01
    """Learning rate of plain SGD."""
    batch: int = 64
    """Samples a step. A last batch of one sample joins the one before."""
    lr_decay: float = 1.0
    """What the rate is multiplied by after every epoch of a task."""
    epochs: int = 50
    """Epochs a task, at most where there is a patience."""
    patience: int = 0
    """After so many epochs without a better validation loss the rate is cut, and in the end the
    best weights are restored (0: no cut, and the last weights stay)."""
    lr_factor: float = 2.0
    """What the rate is divided by when it is cut."""
    lr_min: float = 1e-5
    """A task ends when the rate is cut to less than this."""
    test_batch: int = 64
    """Samples a batch of validation and test. It changes accuracy only where BatchNorm uses the
    statistics of the batch at hand."""
    test_passes: int = 1
    """How many passes over the shuffled test set an accuracy is the mean of: more than one makes
    sense only where BatchNorm uses the batch at hand."""
    redrawn_validation: bool = False
    """Quirk: validation batches are drawn anew in every epoch, because the published code shuffles
    whatever it evaluates; where BatchNorm uses the batch at hand, that is noise in the loss that
    the rate is cut by. No preset has it."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """What the network's own products are rounded to while it trains, where the device can;
    projections, selection and evaluation are not."""
    score_on: Literal["test", "validation"] = "test"
    """What the accuracy matrix is measured on: settings are to be chosen on validation data."""
    evaluate_unseen: bool = False
    """Also evaluate tasks before they are learnt, for the forward transfer (FWT)."""

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
    """One configuration; a seed makes a run of it."""

    benchmark: str
    method_name: str
    preset: str
    training: Training
    method: Method
    data: Options
    data_source: str | None = None
    """A checksum of a user's own data: other data is another configuration."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every field by its name, the sources of a user's own classes as checksums."""
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
        """The settings as a result holds them."""
        return _as_json(self.settings)

    def is_of(self, stored: Mapping[str, Any]) -> bool:
        """Whether a result has these settings, some of which it may be too old to name.

        A setting that is new must do nothing by default.
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
    """By name, as results hold them, the values of settings that need not be given.

    None of a user's own method, whose module need not be at hand, or of what another version has.
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
    """A benchmark's preset for a method, with some of its settings changed by name."""
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
                    f"{method} has an option '{field.name}', which is a setting of its own; name "
                    "the option otherwise."
                )
            owner[field.name] = part
    for key in changes:
        if key not in owner:
            raise ValueError(
                f"There is no setting '{key}' for {method} on {benchmark}; {meant(key, owner)}"
            )
    if (
        entry.tasks and changes.get("tasks") == entry.tasks
    ):  # all of them, as if nothing had been said
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
            raise ValueError(f"{key} is {value!r}, which a result cannot hold; use plain values.")
    return config


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """As they are when they have been written and read."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _plain(value: object) -> bool:
    """Whether a value can be written down: a finite number, a text, None, or several of them."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


_SOURCES: "WeakKeyDictionary[ModuleType, str]" = WeakKeyDictionary()


def _source(path: str, what: str) -> str:
    """A checksum of a user's module: another text is another configuration.

    Read when it is first used: what the file holds later is not what runs.
    """
    module = inspect.getmodule(imported(path, what))
    if module is None:
        return uuid4().hex[:16]
    if module not in _SOURCES:
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):
            text = uuid4().hex  # typed in: nobody can say that it is the same as before
        _SOURCES[module] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _SOURCES[module]
