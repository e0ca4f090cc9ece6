"""Accuracy on selected tasks while later ones are learnt, by method."""

from collections.abc import Iterator

from ..groups import Group
from ..model import Chart
from ..naming import clean, described, file_name
from .means import over_seeds, series, tasks


def evolution(group: Group) -> Iterator[Chart]:
    """Yield a figure for the first task, one a third of the way on and one two thirds."""
    T = tasks(group.members[0])
    of = described(group.benchmark, group.preset, group.changes)
    for t in sorted({0, T // 3, 2 * T // 3}):
        if t == T - 1:
            continue  # nothing is learnt after it
        x = [str(i + 1) for i in range(t, T)]
        places = [(i, t) for i in range(t, T)]
        yield Chart(
            file_name(f"evolution-task-{t + 1}", group.benchmark, group.preset, group.label),
            f"Accuracy on task {t + 1} while later ones are learnt: {of}",
            "lines",
            "after task",
            f"accuracy on task {t + 1}, %",
            tuple(series(results, results[0].method, x, places) for results in group.members),
            clean(group.benchmark),
            preset=clean(group.preset),
            note=over_seeds(group.members[0]),
        )
