"""The accuracy matrix of a configuration as a heat map."""

from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .means import configuration, entries, mean, over_seeds, tasks


def matrix(results: Results) -> Chart:
    """Describe one row per learnt task, empty where a task was not evaluated."""
    run = results[0]
    T = tasks(results)
    x = tuple(str(j + 1) for j in range(T))
    rows = tuple(
        Series(str(i + 1), x, tuple(mean(entries(results, i, j)) for j in range(T)))
        for i in range(T)
    )
    return Chart(
        of_configuration("matrix", results),
        f"Accuracy on every task after each, %: {configuration(run)}",
        "heat",
        "accuracy on task",
        "after task",
        rows,
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        z_label="accuracy, %",
        note=over_seeds(results),
    )
