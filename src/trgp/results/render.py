"""Render results for the terminal: a configuration, all of them, one run, or a comparison.

Tasks are counted from 1 here, accuracies are in per cent, and undefined figures are a dash.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..benchmarks import PAPER, PAPER_DATA
from ..benchmarks.common import Published
from . import layout
from .layout import NONE, Grid, pairs, plain, points, shown, size, spread, stacked, table
from .metrics import Spread
from .paired import p_value
from .phases import Seconds, alike, in_order
from .result import Result, Results
from .store import Found

FIGURES = {"ACC": "acc", "BWT": "bwt", "mean A_ii": "mean_diagonal", "forgetting": "forgetting"}
NAMES = ("benchmark", "method", "preset")
NUMBERS = ("seeds", "ACC", "BWT", "A_ii", "memory", "time", "paper")
SAME_FIGURES = frozenset({"evaluate_unseen", "form"})
"""Settings that change neither ACC nor BWT, only how they are computed or what else is measured."""
REPEATING = ("paper", "official")
"""The presets that should reproduce the paper's figures."""
_UNDEFINED = Spread(None, None, 0)


def summary(results: Results, paper: Published | None) -> RenderableType:
    """Render the end of a run: accuracies, figures next to the paper's, time and memory."""
    first = results.runs[0]
    rows = {"memory held": _held(results), "peak memory": size(_mean(results, _peak))}
    forms = {run.form for run in results if run.form is not None}
    if forms:
        rows["form"] = ", ".join(sorted(forms))
    for name in first.figures:
        values = [run.figures[name] for run in results if name in run.figures]
        rows[name] = f"{statistics.fmean(values):.3f}"
    if first.changed:
        rows["changed"] = layout.settings(first.changed)
    if paper is not None and first.preset == "paper" and first.benchmark in PAPER_DATA:
        rows["the paper's data"] = PAPER_DATA[first.benchmark]
    seeds = ", ".join(str(run.seed) for run in results)
    return stacked(
        [
            plain(f"{first.method} on {first.benchmark}, preset {first.preset}, seed {seeds}"),
            _matrix([run.accuracy_matrix for run in results]),
            _figures(results, paper),
            _times([run.seconds for run in results]),
            pairs(rows),
        ]
    )


def paper_of(run: Result) -> Published | None:
    """Return the published result for an unmodified `paper` or `official` preset; else None."""
    if run.preset not in REPEATING or run.changed.keys() - SAME_FIGURES:
        return None
    return PAPER.get(run.benchmark, {}).get(run.method)


def preset_of(run: Result) -> str:
    """Return the preset and its changed settings."""
    measured = {"score_on": "validation"} if "score_on" in run.changed else {}
    changed = layout.shortened(layout.settings({**measured, **run.changed}))
    return f"{run.preset} ({changed})" if changed else run.preset


def main_table(found: Found) -> Table:
    """Render one row per configuration, by benchmark, the best ACC first."""
    made = table(NAMES, NUMBERS, gap=1)
    for row in _rows(found):
        made.add_row(*map(plain, row))
    return made


def details(result: Result) -> RenderableType:
    """Render everything stored about one run."""
    made = table(["setting", "value", ""], [])
    for key, value in result.config.items():
        note = "changed from the preset" if key in result.changed else ""
        made.add_row(plain(key), plain(shown(value)), note)
    parts: list[RenderableType] = [
        pairs(
            {
                "command": result.command,
                "benchmark": result.benchmark,
                "method": result.method,
                "preset": result.preset,
                "seed": result.seed,
                "device": result.device,
                "versions": ", ".join(f"{name} {v}" for name, v in result.versions.items()),
                "form": result.form or NONE,
                "memory held": _held([result]),
                "peak memory": size(result.peak_memory_bytes),
                "digest": result.digest or NONE,
                "checksum": result.checksum
                or "none (written by trgp 0.1; damage may go unnoticed)",
            }
        ),
        made,
        _matrix([result.accuracy_matrix]),
        _figures(Results((result,)), None),
    ]
    if any(result.selected):
        made = table(["task", "old tasks in the trust region by layer, strongest first"], [])
        for t, layers in enumerate(result.selected):
            made.add_row(str(t + 1), plain(_trusted(layers)))
        parts.append(made)
    if any(result.ranks.values()):
        ranks = [(layer, list(map(str, ranks))) for layer, ranks in result.ranks.items()]
        parts.append(Grid("Protected directions after each task", "layer", ranks))
    if result.curves:
        accuracies = [_validated(curve, result.config) for curve in result.curves]
        counts = [str(len(curve.get("valid_loss", []))) for curve in result.curves]
        rows = [("accuracy", accuracies), ("epochs", counts)]
        parts.append(Grid("Validation of the weights that each task kept", "", rows))
    return stacked([*parts, _times([result.seconds])])


def comparison(a: Results, b: Results) -> RenderableType:
    """Render two configurations side by side, with a paired t-test over their common seeds."""
    parts: list[RenderableType] = []
    same = a.runs[0].benchmark == b.runs[0].benchmark
    if not same:
        warning = "Warning: the benchmarks differ, so the figures are not comparable."
        parts.append(Text(warning, style="yellow"))
    parts.append(_differing(_shared(a), _shared(b)))
    sides = [{run.seed: run for run in side} for side in (a, b)]
    seeds = sorted(sides[0].keys() & sides[1].keys()) if same else []
    tested = len(seeds) > 1
    made = table([""], ["A", "B", "B - A", *(["p"] if tested else [])])
    for name, attribute in FIGURES.items():
        x, y = getattr(a, attribute), getattr(b, attribute)
        row = [name, spread(x), spread(y), points(_difference(x, y), "+")]
        if tested:
            u, v = ([getattr(side[seed], attribute) for seed in seeds] for side in sides)
            row.append(layout.chance(None if None in u + v else p_value(u, v)))
        made.add_row(*row)
    measures: list[tuple[str, Callable[[Result], float], Callable[[float], str]]] = [
        ("time", _total, layout.duration),
        ("memory held", _state, size),
        ("peak memory", _peak, size),
    ]
    for name, measure, written in measures:
        before, after = _mean(a, measure), _mean(b, measure)
        sign = "-" if after < before else "+"
        made.add_row(name, written(before), written(after), sign + written(abs(after - before)))
    parts.append(made)
    if tested:
        listed = ", ".join(map(str, seeds))
        parts.append(Text(f"p: paired t-test, two-sided, over the seeds {listed}"))
    return stacked(parts)


def _rows(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the main table."""

    def place(results: Results) -> tuple[str, float]:
        return results.runs[0].benchmark, -_mean(results, lambda run: run.acc)

    for results in sorted(found.results, key=place):
        run = results.runs[0]
        paper = paper_of(run)
        yield (
            run.benchmark,
            run.method,
            preset_of(run),
            str(len(results)),
            spread(results.acc, "±"),
            spread(results.bwt, "±"),
            points(results.mean_diagonal.mean),
            size(_mean(results, _state)),
            layout.duration(_mean(results, _total)),
            NONE if paper is None else f"{paper.acc:.2f}",
        )


def _matrix(matrices: Sequence[Sequence[Sequence[float | None]]]) -> Grid:
    """Render the accuracy matrix, mean over seeds, blank where a task was not evaluated."""
    T = len(matrices[0])
    decimals = 1 if T <= 12 else 0  # so that twenty tasks fit side by side

    def cell(i: int, j: int) -> str:
        values = [R[i][j] for R in matrices]
        known = [value for value in values if value is not None]
        whole = len(known) == len(values)
        return f"{100 * statistics.fmean(known):.{decimals}f}" if whole else ""

    rows = [(str(i + 1), [cell(i, j) for j in range(T)]) for i in range(T)]
    return Grid("Accuracy on every task (columns) after each (rows), %", "", rows)


def _figures(results: Results, paper: Published | None) -> RenderableType:
    """Render the figures of the matrix over the seeds, next to the paper's."""
    figures = {name: getattr(results, attribute) for name, attribute in FIGURES.items()}
    if results.fwt.mean is not None:
        figures["FWT"] = results.fwt
    columns = ["here"] if paper is None else ["here", "paper", "difference"]
    made = table([""], columns, title="Figures, %")
    published = {} if paper is None else _published(paper)
    for name, figure in figures.items():
        theirs = published.get(name, _UNDEFINED)
        row = [spread(figure), spread(theirs), points(_difference(theirs, figure), "+")]
        made.add_row(name, *row[: len(columns)])
    return made


def _published(paper: Published) -> dict[str, Spread]:
    """Return the paper's figures as fractions."""
    acc, std, bwt = (None if value is None else value / 100 for value in paper)
    return {"ACC": Spread(acc, std, 0), "BWT": Spread(bwt, None, 0)}


def _times(stored: Sequence[Seconds]) -> RenderableType:
    """Render time by task and phase, mean over seeds."""
    runs = alike(stored)
    phases = in_order(phase for tasks in runs for task in tasks for phase in task)
    made = table(["task"], [*phases, "all"], title="Time", gap=1)
    total = [0.0] * (len(phases) + 1)
    for t, tasks in enumerate(zip_longest(*runs, fillvalue={})):
        means = [statistics.fmean(task.get(phase, 0.0) for task in tasks) for phase in phases]
        means.append(sum(means))
        total = [sum(pair) for pair in zip(total, means, strict=True)]
        made.add_row(str(t + 1), *map(layout.duration, means))
    made.add_row("all", *map(layout.duration, total), style="bold")
    return made


def _held(results: Sequence[Result]) -> str:
    copies = _mean(results, lambda run: run.state_bytes / run.network_bytes)
    return f"{size(_mean(results, _state))}, {copies:.2f} copies of the network"


def _trusted(layers: Mapping[str, Sequence[int]]) -> str:
    """List the old tasks that a task trusts, by layer."""
    chosen = (
        f"{layer}: {', '.join(str(task + 1) for task in tasks)}"
        for layer, tasks in layers.items()
        if tasks
    )
    return "; ".join(chosen) or NONE


def _validated(curve: Mapping[str, Sequence[float]], config: Mapping[str, Any]) -> str:
    """Return the validation accuracy of the weights that a task kept."""
    epochs = list(zip(curve.get("valid_loss", []), curve.get("valid_accuracy", []), strict=False))
    if not epochs:
        return NONE
    # With patience the best weights are restored, otherwise the last ones stay.
    _, accuracy = min(epochs, key=lambda epoch: epoch[0]) if config.get("patience") else epochs[-1]
    return f"{100 * accuracy:.1f}"


def _shared(results: Results) -> dict[str, Any]:
    """Return settings, preset, device and so on that all seeds of a configuration share."""
    first = results.runs[0]
    around = {name: getattr(first, name) for name in ("benchmark", "method", "preset", "device")}
    return around | {
        key: value
        for key, value in first.config.items()
        if all(run.config.get(key) == value for run in results)
    }


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> RenderableType:
    made = table(["setting", "A", "B"], [], title="What differs")
    for key in {**a, **b}:
        cells = [shown(side[key]) if key in side else NONE for side in (a, b)]
        if cells[0] != cells[1]:
            made.add_row(plain(key), *map(plain, cells))
    return made if made.row_count else Text("The settings are the same.")


def _difference(a: Spread, b: Spread) -> float | None:
    return None if a.mean is None or b.mean is None else b.mean - a.mean


def _mean(results: Iterable[Result], measure: Callable[[Result], float]) -> float:
    return statistics.fmean(map(measure, results))


def _total(run: Result) -> float:
    return sum(sum(task.values()) for task in run.seconds)


def _state(run: Result) -> float:
    return run.state_bytes


def _peak(run: Result) -> float:
    return run.peak_memory_bytes
