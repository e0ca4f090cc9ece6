"""Validation accuracy against the epoch, task after task."""

from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .means import configuration, mean, over_seeds


def curves(results: Results) -> Chart | None:
    """Describe the epochs of all tasks on one axis, with a gap between tasks.

    A task is as long as in its longest seed; past the end of a seed, the mean is over the seeds
    that are still learning.
    """
    run = results[0]
    learnt = [[curve.get("valid_accuracy", []) for curve in run.curves] for run in results]
    x: list[float] = []
    y: list[float | None] = []
    boundaries: list[tuple[float, str]] = []
    done = 0
    for t in range(max(map(len, learnt))):
        seeds = [tasks[t] for tasks in learnt if t < len(tasks) and tasks[t]]
        if not seeds:
            continue
        length = max(map(len, seeds))
        for epoch in range(length):
            x.append(done + epoch + 1)
            y.append(mean([seed[epoch] for seed in seeds if epoch < len(seed)]))
        done += length
        x.append(done + 0.5)
        y.append(None)
        boundaries.append((done + 0.5, f"task {t + 1}"))
    if not x:
        return None
    method = clean(run.method)
    return Chart(
        of_configuration("curves", results),
        f"Validation accuracy: {configuration(run)}",
        "lines",
        "epoch",
        "validation accuracy, %",
        (Series(method, tuple(x[:-1]), tuple(y[:-1]), method=method),),
        clean(run.benchmark),
        method,
        clean(run.preset),
        boundaries=tuple(boundaries),
        note=f"{over_seeds(results)} After a seed ends a task early, the mean is over the others.",
    )
