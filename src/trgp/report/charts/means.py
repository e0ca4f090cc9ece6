"""Means over seeds in per cent, and other helpers that figures share."""

import statistics
from collections.abc import Sequence

from ...results.layout import settings
from ...results.render import SAME_FIGURES
from ...results.result import Result, Results
from ..model import Series
from ..naming import clean

Values = list[float | None]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean in per cent; None if any value is None."""
    known = [value for value in values if value is not None]
    return 100 * statistics.fmean(known) if known and len(known) == len(values) else None


def deviation(values: Sequence[float | None]) -> float | None:
    """Return the standard deviation in per cent; None for fewer than two values."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    return 100 * statistics.stdev(known) if whole and len(known) > 1 else None


def entries(results: Results, i: int, j: int) -> Values:
    """Return the accuracy on task j after task i, per seed."""
    return [run.accuracy_matrix[i][j] for run in results]


def tasks(results: Results) -> int:
    return len(results[0].accuracy_matrix)


def series(
    results: Results, name: str, x: Sequence[float | str], places: Sequence[tuple[int, int]]
) -> Series:
    """Return a series of entries of the matrix, with deviations if there are several seeds."""
    values = [entries(results, i, j) for i, j in places]
    errors = tuple(map(deviation, values)) if len(results) > 1 else ()
    return Series(clean(name), tuple(x), tuple(map(mean, values)), errors, clean(results[0].method))


def configuration(run: Result) -> str:
    """Describe a configuration for the title of its figure."""
    changes = {
        key: value
        for key, value in run.changed.items()
        if key not in SAME_FIGURES and not key.endswith("_source")
    }
    changed = f", {settings(changes)}" if changes else ""
    return clean(f"{run.method} on {run.benchmark}, preset {run.preset}{changed}")


def over_seeds(results: Results) -> str:
    return "One seed." if len(results) == 1 else f"Mean over {len(results)} seeds."
