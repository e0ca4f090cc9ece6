"""The old tasks in the trust region, by layer and task, as a grid."""

from ...results.result import Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .layers import in_order
from .means import configuration, tasks


def selection(results: Results) -> Chart | None:
    """One seed's, since a choice has no mean."""
    run = results[0]
    layers = in_order({layer for chosen in run.selected for layer in chosen})
    if not any(any(chosen.values()) for chosen in run.selected):
        return None
    later = range(1, tasks(results))
    x = tuple(str(t + 1) for t in later)
    chosen = [[run.selected[t].get(layer, []) for t in later] for layer in layers]
    scope = {"layer": "layer-wise", "task": "task-wise"}.get(str(run.config.get("scope")), "")
    return Chart(
        of_configuration("selection", results),
        f"Old tasks in the trust region: {configuration(run)}, seed {run.seed}",
        "grid",
        "task",
        "layer",
        tuple(
            Series(clean(layer), x, tuple(float(len(old)) for old in row))
            for layer, row in zip(layers, chosen, strict=True)
        ),
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        texts=tuple(
            tuple(", ".join(str(task + 1) for task in old) for old in row) for row in chosen
        ),
        note=f"{scope.capitalize()}, strongest first; empty where no old task is trusted."
        if scope
        else "Strongest first; empty where no old task is trusted.",
    )
