"""Make cells of tables: figures over seeds, differences, bytes and times."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..results.layout import NONE, chance, duration, points, size, spread
from ..results.metrics import Spread
from ..results.render import preset_of
from ..results.result import Result, Results
from .commands import command_for, commands_of
from .model import Cell, Mark, Row
from .naming import clean
from .paired_marks import Measure, Verdict, difference

EMPTY = Cell(NONE)


def text(content: object) -> Cell:
    return Cell(clean(content))


def number(value: float, written: str) -> Cell:
    return Cell(written, value)


def share(figure: Spread, mark: Mark = "", note: str = "") -> Cell:
    """Make a cell of a fraction over seeds, in per cent."""
    if figure.mean is None:
        return Cell(NONE, note=note)
    return Cell(spread(figure), 100 * figure.mean, mark, note=note)


def percent(value: float | None, std: float | None = None, note: str = "") -> Cell:
    """Make a cell of a published figure, which is in per cent already."""
    if value is None:
        return Cell(NONE, note=note)
    written = f"{value:.2f}" if std is None else f"{value:.2f} ± {std:.2f}"
    return Cell(written, value, note=note)


def rounded(value: float | None) -> Cell:
    """Make a cell of the paper's BWT, with the digits it prints."""
    return EMPTY if value is None else Cell(f"{value:g}", value)


def beside(here: float | None, paper: float | None, note: str = "") -> Cell:
    """Make a cell of the difference to the paper's figure, in points."""
    if here is None or paper is None:
        return Cell(NONE, note=note)
    gap = here - paper / 100
    return Cell(points(gap, "+"), 100 * gap, note=note)


def gap_and_p(before: Results | None, after: Results, measure: Measure) -> tuple[Cell, Cell]:
    """Make cells of the difference between two configurations and its p-value."""
    gap = None if before is None else difference(before, after, measure)
    if before is None or gap is None:
        return EMPTY, EMPTY
    if gap.seeds == 1:
        note = "one seed in common: no test"
    elif gap.p is None:
        note = f"equal in all {gap.seeds} seeds"
    else:
        note = f"over {gap.seeds} seeds in common"
    both = repeated_by(before, after)
    return both(Cell(points(gap.mean, "+"), 100 * gap.mean, note=note)), both(_p(gap.p, note))


def p_against_best(results: Results, verdict: Verdict) -> Cell:
    cell = _p(verdict.p, verdict.note)
    return cell if verdict.best is None else repeated_by(verdict.best, results)(cell)


def _p(value: float | None, note: str) -> Cell:
    return Cell(chance(value), value, note=note)


def held(count: float) -> Cell:
    return Cell(size(count), count)


def lasting(seconds: float) -> Cell:
    return Cell(f"{seconds:.2f} s" if seconds < 10 else duration(seconds), seconds)


def repeated_by(*several: Results) -> Callable[[Cell], Cell]:
    """Return a function that gives a number the commands repeating it; a dash stays a dash."""
    commands = commands_of(*several)
    return lambda cell: cell if cell.value is None else replace(cell, commands=commands)


def not_run(
    benchmark: str, method: str, preset: str = "paper", changes: Mapping[str, Any] | None = None
) -> Cell:
    """Make a cell for a missing number, with the command that would run it."""
    return Cell("not run", commands=(command_for(benchmark, method, preset, changes),))


def mean(results: Results, measure: Callable[[Result], float]) -> float:
    return statistics.fmean(map(measure, results))


def preset(run: Result) -> Cell:
    return text(preset_of(run))


def seeds(results: Results) -> Cell:
    return Cell(str(len(results)), len(results))


def row(run: Result, *cells: Cell) -> Row:
    return Row(cells, clean(run.benchmark), clean(run.method), clean(run.preset))
