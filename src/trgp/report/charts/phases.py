"""Time per task, by phase."""

import statistics

from ...results.phases import alike, in_order
from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .means import configuration, over_seeds


def phases(results: Results) -> Chart | None:
    """Describe stacked bars of the mean over seeds."""
    run = results[0]
    runs = alike([r.seconds for r in results])
    names = in_order(
        name for tasks in runs for task in tasks for name, spent in task.items() if spent
    )
    T = max(map(len, runs))
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
                    statistics.fmean(tasks[t].get(name, 0.0) for tasks in runs if t < len(tasks))
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
