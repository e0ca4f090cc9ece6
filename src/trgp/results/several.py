"""Merge the results under several folders."""

import os
from collections.abc import Sequence

from .result import Result, Results
from .store import RESULT, Defaults, Found, alike, find, unfinished


def find_in(folders: Sequence[str], defaults: Defaults) -> Found:
    """Find all results, a configuration's seeds together wherever they lie, and all problems.

    A seed in several folders is taken from the first. defaults: as for `store.read`.
    """
    found = Found([], [])
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        here = find(folder, defaults)
        found.problems.extend(here.problems)
        if os.path.isdir(folder):
            found.problems.extend(
                f"{path} has no {RESULT}: its run is in progress or was stopped; repeat the run's "
                "command to finish it."
                for path in unfinished(folder)
            )
        for results in here.results:
            _add(found, results, defaults)
    return found


def _add(found: Found, results: Results, defaults: Defaults) -> None:
    for i, other in enumerate(found.results):
        if alike(other[0], results[0], defaults):
            found.results[i] = _joined(other, results, found.problems)
            return
    found.results.append(results)


def _joined(first: Results, second: Results, problems: list[str]) -> Results:
    runs: dict[int, Result] = {run.seed: run for run in first}
    for run in second:
        if run.seed in runs:
            problems.append(
                f"Seed {run.seed} of {run.method} on {run.benchmark}, preset {run.preset}, is in "
                "several folders; the first is shown. Leave out the others."
            )
        runs.setdefault(run.seed, run)
    return Results(tuple(runs[seed] for seed in sorted(runs)))
