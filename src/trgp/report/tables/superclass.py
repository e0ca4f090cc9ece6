"""CIFAR-100 superclasses: accuracy and the memory it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...benchmarks import PAPER
from ...methods import METHODS
from ...methods.capacity import PUBLISHED, WHOLE
from ...results.render import paper_of
from ...results.result import Result, Results
from .. import cells
from ..groups import as_presets, data_of
from ..model import Cell, Row, Table
from ..paired_marks import Verdict, verdicts
from ..published import CAPACITY
from .main import papers_and_gaps, was_run
from .notes import MARKS, joined, papers_data

NAME = "cifar100-superclass"
COLUMNS = (
    "method",
    "preset",
    "seeds",
    "ACC %",
    "paper's ACC",
    "ACC - paper",
    "capacity %",
    "paper's capacity %",
    "kept in all, % of the network",
    "held beside the network",
    "p against the best",
)
NOTE = (
    "Capacity is counted as in the paper: the final size of the networks in per cent of one "
    "network. For single that is one network per task; for a growing method, all stored weights "
    "that are not 0, with the newest task's head only; for all others here, one network that does "
    "not grow. Bases, scaling matrices, stored samples and masks are not counted in it. They are "
    "counted in the column kept in all: everything that old tasks are evaluated with or protected "
    "by."
)


def superclass(found: Sequence[Results]) -> Table:
    """Build a table of all unmodified presets, and of the paper's methods that were not run."""
    here = [results for results in as_presets(found) if results[0].benchmark == NAME]
    groups: dict[str, list[Results]] = {}
    for results in here:
        groups.setdefault(data_of(results[0]), []).append(results)
    rows = [
        _row(results, verdict)
        for group in groups.values()
        for results, verdict in zip(group, verdicts(group, lambda run: run.acc), strict=True)
    ]
    rows.sort(key=lambda row: -(row.cells[3].value or 0))
    note = joined(NOTE, MARKS, papers_data([NAME]))
    rows += _not_run(found)
    return Table("superclass", "CIFAR-100 superclasses", COLUMNS, tuple(rows), note)


def kept_bytes(run: Result) -> int:
    """Return the bytes of network and method state; the state alone if it holds the network."""
    method = METHODS.get(run.method)
    within = method is not None and method.about.holds_network
    return run.state_bytes if within else run.network_bytes + run.state_bytes


def _capacity(results: Results) -> Cell:
    run = results[0]
    if run.method not in METHODS:
        return cells.EMPTY
    if all(PUBLISHED in each.figures for each in results):
        counted = cells.mean(results, lambda each: each.figures[PUBLISHED])
        whole = cells.mean(results, lambda each: each.figures[WHOLE])
        cell = cells.number(counted, f"{counted:.0f}")
        return replace(cell, note=f"{whole:.0f} with every task's head")
    networks = len(run.accuracy_matrix) if run.method == "single" else 1
    return cells.number(100.0 * networks, str(100 * networks))


def _row(results: Results, verdict: Verdict) -> Row:
    run, own = results[0], cells.repeated_by(results)
    paper, gap, _, _ = papers_and_gaps(paper_of(run), results)
    kept = 100 * cells.mean(results, lambda run: kept_bytes(run) / run.network_bytes)
    return cells.row(
        run,
        cells.text(run.method),
        cells.preset(run),
        own(cells.seeds(results)),
        own(cells.share(results.acc, verdict.mark, verdict.note)),
        paper,
        gap,
        own(_capacity(results)),
        _papers_capacity(run.method),
        own(cells.number(kept, f"{kept:.0f}")),
        own(cells.held(cells.mean(results, lambda run: run.state_bytes))),
        cells.p_against_best(results, verdict),
    )


def _papers_capacity(method: str) -> Cell:
    if method not in CAPACITY:
        return cells.EMPTY
    return cells.number(CAPACITY[method], f"{CAPACITY[method]:.0f}")


def _not_run(found: Sequence[Results]) -> Iterator[Row]:
    for method, paper in PAPER[NAME].items():
        if not was_run(found, NAME, method):
            made = (
                cells.text(method),
                cells.text("paper"),
                cells.EMPTY,
                cells.not_run(NAME, method),
                cells.percent(paper.acc, paper.std),
                cells.EMPTY,
                cells.EMPTY,
                _papers_capacity(method),
                cells.EMPTY,
                cells.EMPTY,
                cells.EMPTY,
            )
            yield Row(made, NAME, method, "paper", not_run=True)
