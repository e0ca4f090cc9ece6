"""How many directions of each layer are protected after every task."""

import statistics

from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .layers import in_order
from .means import configuration, over_seeds, tasks


def ranks(results: Results) -> Chart | None:
    """The mean over the seeds that have the layer's."""
    run = results[0]
    T = tasks(results)
    x = tuple(str(t + 1) for t in range(T))
    lines = []
    for layer in in_order(run.ranks):
        counts = [r.ranks[layer] for r in results if len(r.ranks.get(layer, [])) == T]
        if counts:
            y = tuple(statistics.fmean(column) for column in zip(*counts, strict=True))
            lines.append(Series(clean(layer), x, y))
    if not lines:
        return None
    return Chart(
        of_configuration("ranks", results),
        f"Protected directions of each layer: {configuration(run)}",
        "lines",
        "after task",
        "directions",
        tuple(lines),
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        note=f"{over_seeds(results)} A layer is full when there are as many as it has inputs.",
    )
