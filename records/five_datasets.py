"""5-Datasets: what the right Fashion-MNIST costs, and which old tasks it trusts."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from recorded import Found, Wanted, recorded
from table_parts import figure, papers_acc, texts

from trgp.benchmarks import PAPER
from trgp.benchmarks.five_datasets import SETS
from trgp.methods import METHODS
from trgp.report import cells
from trgp.report.charts.layers import in_order
from trgp.report.markdown import rows_markdown
from trgp.report.model import Row, Table
from trgp.report.published import DIAGONAL
from trgp.results.result import Results

NAME = "five-datasets"
TASKS = tuple(SETS)
FOURTH = TASKS.index("fashion_mnist")
TWICE = "mnist_for_fashion"


def five_datasets(found: Found) -> str:
    """With Fashion-MNIST as it should be, and with MNIST in its place as published."""
    columns = (
        *("method", "preset", "fourth task", "seeds", "ACC %", "paper's ACC", "ACC - paper"),
        *("BWT %", "paper's BWT", "A_44 %", "paper's A_44", "Fashion-MNIST - MNIST", "p"),
    )
    rows = [
        _row(found, wanted)
        for method in METHODS
        for wanted in _ways(method)
        if wanted in _always(method) or recorded(found, wanted) is not None
    ]
    return rows_markdown(Table("", "", columns, tuple(rows)))


def _ways(method: str) -> list[Wanted]:
    """Each preset with its own data and with the other."""
    pairs: list[tuple[str, dict[str, Any]]] = [
        ("paper", {}),
        ("paper", {TWICE: True}),
        ("official", {TWICE: False}),
        ("official", {}),
    ]
    return [Wanted(NAME, method, *pair) for pair in pairs]


def _always(method: str) -> list[Wanted]:
    """What is shown also where it is not run."""
    if method in ("gpm", "trgp"):
        return _ways(method)
    return _ways(method)[:1] if method in PAPER[NAME] else []


def _twice(wanted: Wanted) -> bool:
    return bool(wanted.changes.get(TWICE, wanted.preset == "official"))


def _row(found: Found, wanted: Wanted) -> Row:
    twice = _twice(wanted)
    names = [
        cells.text(wanted.method),
        cells.text(wanted.preset),
        cells.text("MNIST again" if twice else "Fashion-MNIST"),
    ]
    paper = PAPER[NAME].get(wanted.method)
    printed = DIAGONAL[NAME].get(wanted.method)
    fourth = figure(None if printed is None else printed[FOURTH], ".1f")
    bwt = cells.rounded(None if paper is None else paper.bwt)
    results = recorded(found, wanted)
    if results is None:
        figures = (
            *(cells.EMPTY, cells.not_run(*wanted), papers_acc(wanted), cells.EMPTY),
            *(cells.EMPTY, bwt, cells.EMPTY, fourth, cells.EMPTY, cells.EMPTY),
        )
        return Row((*names, *figures), *wanted[:3], not_run=True)
    learnt = [run.accuracy_matrix[FOURTH][FOURTH] for run in results]
    known = [accuracy for accuracy in learnt if accuracy is not None]
    (other,) = (w for w in _ways(wanted.method) if w.preset == wanted.preset and w != wanted)
    before = None if twice else recorded(found, other)
    figures = (
        *(cells.seeds(results), cells.share(results.acc), papers_acc(wanted)),
        cells.beside(results.acc.mean, None if paper is None else paper.acc),
        *(cells.share(results.bwt), bwt),
        figure(100 * statistics.fmean(known) if known else None, ".2f"),
        *(fourth, *cells.gap_and_p(before, results, lambda run: run.acc)),
    )
    return Row((*names, *figures), *wanted[:3])


def trusted(found: Found) -> str:
    """How many seeds trust which old task, layer by layer, when the fourth task is learnt."""
    pairs = [(wanted, recorded(found, wanted)) for wanted in _ways("trgp")]
    shown = {_trust_title(w, results): results for w, results in pairs if results is not None}
    if not shown:
        return "Not run."
    layers = in_order({layer for results in shown.values() for layer in _choices(results)})
    rows = [
        (layer, *(_counted(_choices(results).get(layer, [])) for results in shown.values()))
        for layer in layers
    ]
    shares = (
        _counted([t for chosen in _choices(r).values() for t in chosen]) for r in shown.values()
    )
    return texts(("layer", *shown), [*rows, ("all layers", *shares)])


def _trust_title(wanted: Wanted, results: Results) -> str:
    fourth = "MNIST again" if _twice(wanted) else "Fashion-MNIST"
    return f"{wanted.preset}, {fourth}, seeds: {len(results)}"


def _choices(results: Results) -> dict[str, list[int]]:
    """By layer the old tasks that the fourth trusts, those of all seeds together."""
    chosen: dict[str, list[int]] = {}
    for run in results:
        for layer, tasks in run.selected[FOURTH].items():
            chosen.setdefault(layer, []).extend(tasks)
    return chosen


def _counted(tasks: Sequence[int]) -> str:
    counts = sorted(Counter(tasks).items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{TASKS[task]} {count}" for task, count in counts) or "none"
