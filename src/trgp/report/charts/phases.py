"""The time that every task takes, by phase."""

import statistics

from ...results.render import PHASES
from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .means import configuration, over_seeds


def phases(results: Results) -> Chart | None:
    """Stacked bars, the mean over seeds."""
    run = results[0]
    known = {name for r in results for task in r.seconds for name, spent in task.items() if spent}
    names = [phase for phase in PHASES if phase in known] + sorted(known - {*PHASES})
    T = max(len(r.seconds) for r in results)
    if not names:
        return None
    x = tuple(str(t + 1) for t in range(T))
    return Chart(
        of_configuration("time", results),
        f"Time of each task: {configuration(run)}",
        "stacked",
        "task",
        "seconds",
        tuple(
            Series(
                clean(name),
                x,
                tuple(
                    statistics.fmean(
                        r.seconds[t].get(name, 0.0) for r in results if t < len(r.seconds)
                    )
                    for t in range(T)
                ),
            )
            for name in names
        ),
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        note=over_seeds(results),
    )
