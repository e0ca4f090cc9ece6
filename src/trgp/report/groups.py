"""Group stored results that share data and settings."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..benchmarks import NAMES, entry
from ..methods import METHODS
from ..results.layout import settings
from ..results.render import SAME_FIGURES
from ..results.result import Result, Results

BOUNDS = ("single", "multitask")
"""Reference points: methods that do not learn tasks one after another in one network."""
DATA = frozenset(
    {field.name for name in NAMES for field in fields(entry(name).options)}
    | {"score_on", "data_source", "model_source"}
)
"""Settings that decide which data is learnt and measured, not how."""


def data_of(run: Result) -> str:
    """Return a key of the data learnt and measured; accuracies compare only if it is equal.

    A setting that is off or None counts as missing, because older versions lack it.
    """
    chosen = {key: value for key, value in run.config.items() if key in DATA and value}
    return json.dumps([run.benchmark, len(run.accuracy_matrix), chosen], sort_keys=True)


def varied(run: Result) -> dict[str, Any]:
    """Return the settings of method and training that differ from the preset's."""
    without = SAME_FIGURES | DATA
    return {key: value for key, value in run.changed.items() if key not in without}


def as_presets(found: Iterable[Results]) -> list[Results]:
    """Return the results with unmodified presets, whatever the data."""
    return [results for results in found if not varied(results[0])]


def by_benchmark(found: Iterable[Results]) -> list[Results]:
    """Sort results by benchmark, then by method."""
    return sorted(found, key=lambda results: place(results[0].benchmark, results[0].method))


def place(benchmark: str, method: str) -> tuple[int, str, int, str]:
    """Return a sort key: benchmarks and methods of the package first, in its order."""
    return *_rank(benchmark, NAMES), *_rank(method, tuple(METHODS))


def _rank(name: str, known: Sequence[str]) -> tuple[int, str]:
    return known.index(name) if name in known else len(known), name


@dataclass(frozen=True)
class Group:
    """Results on the same data with the same changes to the same preset."""

    benchmark: str
    preset: str
    changes: dict[str, Any]
    members: list[Results]

    @property
    def label(self) -> str:
        """The changes in one line; empty if there are none."""
        return settings(self.changes)


def compared(found: Iterable[Results]) -> list[Group]:
    """Return the groups that figures over methods show.

    An unmodified preset makes a group of any size; changed settings need several methods that
    share them.
    """
    groups: dict[tuple[str, str, str], list[Results]] = {}
    for results in by_benchmark(found):
        run = results[0]
        key = data_of(run), run.preset, json.dumps(varied(run), sort_keys=True)
        groups.setdefault(key, []).append(results)
    made = []
    for members in groups.values():
        run = members[0][0]
        if not varied(run) or len({results[0].method for results in members}) > 1:
            made.append(Group(run.benchmark, run.preset, _changes(members), members))
    return made


def _changes(members: Sequence[Results]) -> dict[str, Any]:
    """Return the changes the members share, for a title; checksums are left out."""
    return {
        key: value
        for key, value in members[0][0].changed.items()
        if key not in SAME_FIGURES and not key.endswith("_source")
    }
