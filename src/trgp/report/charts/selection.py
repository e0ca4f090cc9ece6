"""Old tasks in the trust region, by layer and task, as a grid."""

from ...results.result import Result, Results
from ..model import Chart, Series
from ..naming import clean, of_configuration
from .layers import in_order
from .means import configuration, tasks


def selection(results: Results) -> Chart | None:
    """Describe the selection of the first seed, and how many seeds select the same."""
    run = results[0]
    layers = in_order({layer for chosen in run.selected for layer in chosen})
    if not any(any(chosen.values()) for chosen in run.selected):
        return None
    later = range(1, tasks(results))
    x = tuple(str(t + 1) for t in later)
    return Chart(
        of_configuration("selection", results),
        f"Old tasks in the trust region: {configuration(run)}, seed {run.seed}",
        "grid",
        "task",
        "layer",
        tuple(
            Series(clean(layer), x, tuple(_agreeing(results, t, layer) for t in later))
            for layer in layers
        ),
        clean(run.benchmark),
        clean(run.method),
        clean(run.preset),
        z_label="seeds that trust the same",
        texts=tuple(
            tuple(", ".join(str(old + 1) for old in _chosen(run, t, layer)) for t in later)
            for layer in layers
        ),
        note=_note(results),
    )


def _chosen(run: Result, t: int, layer: str) -> list[int]:
    return run.selected[t].get(layer, []) if t < len(run.selected) else []


def _agreeing(results: Results, t: int, layer: str) -> float | None:
    """Count the seeds that trust the first seed's old tasks, in any order; None if it has none."""
    first = {*_chosen(results[0], t, layer)}
    same = [run for run in results if {*_chosen(run, t, layer)} == first]
    return float(len(same)) if first else None


def _note(results: Results) -> str:
    scope = {"layer": "Layer-wise", "task": "Task-wise"}.get(str(results[0].config.get("scope")))
    order = "strongest first; empty where no old task is trusted."
    said = f"{scope}, {order}" if scope else order.capitalize()
    if len(results) == 1:
        return said
    return f"{said} The darker, the more of the {len(results)} seeds trust the same old tasks."
