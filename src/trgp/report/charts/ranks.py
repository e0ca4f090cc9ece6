"""Protected directions of each layer after every task."""

import statistics

from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from ..widths import widths
from .layers import in_order
from .means import configuration, over_seeds, tasks


def ranks(results: Results) -> Chart | None:
    """Describe the protected directions in per cent of a layer's inputs, or their number.

    The mean is over the seeds that stored the layer.
    """
    run = results[0]
    T = tasks(results)
    means = {}
    for layer in in_order(run.ranks):
        counts = [r.ranks[layer] for r in results if len(r.ranks.get(layer, [])) == T]
        if counts:
            means[layer] = [statistics.fmean(column) for column in zip(*counts, strict=True)]
    if not means:
        return None
    known = widths(run)
    whole = known if means.keys() <= known.keys() else {}
    x = tuple(str(t + 1) for t in range(T))
    lines = []
    for layer, mean in means.items():
        name, scale = clean(layer), 1.0
        if whole:
            name, scale = f"{name} (of {whole[layer]})", 100 / whole[layer]
        lines.append(Series(name, x, tuple(scale * count for count in mean)))
    full = "100 %" if whole else "as many as it has inputs"
    return Chart(
        of_configuration("ranks", results),
        f"Protected directions of each layer: {configuration(run)}",
        "lines",
        "after task",
        "directions, % of all" if whole else "directions",
        tuple(lines),
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        note=f"{over_seeds(results)} A layer's memory is full at {full}.",
    )
