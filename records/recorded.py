"""Which cells the record is to have, and what of them there is."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trgp.engine.config import Config
from trgp.engine.sweeps import SWEEPS
from trgp.results.render import SAME_FIGURES
from trgp.results.result import Result, Results

Found = Sequence[Results]


class Wanted(NamedTuple):
    """A configuration by what it is asked for with."""

    benchmark: str
    method: str
    preset: str = "paper"
    changes: Mapping[str, Any] = {}
    """To the preset, as results hold them: lists, no tuples."""


def recorded(found: Found, wanted: Wanted) -> Results | None:
    """Its results, the plainest where some differ in what changes no figure; None: not run."""
    here = [results for results in found if _matches(results[0], wanted)]
    return min(here, key=lambda results: len(results[0].changed), default=None)


def pairs(before: Results | None, after: Results | None) -> list[tuple[float, float]]:
    """ACC before and after, by the seeds that both have."""
    if before is None or after is None:
        return []
    accs = {run.seed: run.acc for run in before}
    return [(accs[run.seed], run.acc) for run in after if run.seed in accs]


def percent(results: Results) -> float:
    """Their mean ACC."""
    return 100 * statistics.fmean(run.acc for run in results)


def changes_of(run: Result) -> dict[str, Any]:
    """What was changed of the preset, but for what changes no figure."""
    return {key: value for key, value in run.changed.items() if key not in SAME_FIGURES}


def of_sweep(name: str) -> Iterator[tuple[Wanted, int]]:
    """The configurations of a sweep, each once, with the number of seeds it asks for."""
    seen: dict[str, tuple[Wanted, int]] = {}
    for grid in SWEEPS[name]():
        seeds = grid.seeds if isinstance(grid.seeds, int) else len(grid.seeds)
        for config in grid.configs():
            wanted = _wanted(config)
            seen.setdefault(json.dumps(wanted, sort_keys=True), (wanted, seeds))
    yield from seen.values()


def _wanted(config: Config) -> Wanted:
    changes = json.loads(json.dumps(config.changed))
    return Wanted(config.benchmark, config.method_name, config.preset, changes)


def _matches(run: Result, wanted: Wanted) -> bool:
    named = run.benchmark, run.method, run.preset
    return named == wanted[:3] and changes_of(run) == wanted.changes
