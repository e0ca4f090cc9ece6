"""Final accuracy on every task, by method."""

from ..groups import Group
from ..model import Chart
from ..naming import clean, described, file_name
from .means import over_seeds, series, tasks

FEW_BARS = 30


def final_accuracy(group: Group) -> Chart:
    """Describe bars if there are few, else lines, of which more can be distinguished."""
    T = tasks(group.members[0])
    x = [str(t + 1) for t in range(T)]
    places = [(T - 1, t) for t in range(T)]
    of = group.benchmark, group.preset, group.changes
    return Chart(
        file_name("final-accuracy", group.benchmark, group.preset, group.label),
        f"Accuracy after the last task: {described(*of)}",
        "bars" if len(group.members) * T <= FEW_BARS else "lines",
        "task",
        "accuracy, %",
        tuple(series(results, results[0].method, x, places) for results in group.members),
        clean(group.benchmark),
        preset=clean(group.preset),
        note=over_seeds(group.members[0]),
    )
