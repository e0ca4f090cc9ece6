"""What a report holds before it is written or drawn: tables and charts as plain data.

Every chart is described once and drawn twice, by matplotlib for files and in the page for the eye
and the mouse. Accuracies are in per cent here, and tasks are counted from 1.
"""

from dataclasses import dataclass, field
from typing import Literal

from ..results.layout import NONE

Mark = Literal["", "best", "near"]
Kind = Literal["bars", "lines", "heat", "grid", "stacked", "points"]


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    text: str
    """As it is read; empty where there is nothing to say."""
    value: float | None = None
    """What rows are sorted by, where that is a number."""
    mark: Mark = ""
    """best of its group, or near: not told from the best by a paired test over seeds."""
    commands: tuple[str, ...] = ()
    """What repeats the number, or what would run it."""
    note: str = ""
    """What is worth knowing beside it, such as a p-value."""


@dataclass(frozen=True)
class Row:
    """A row, and what it is found by."""

    cells: tuple[Cell, ...]
    benchmark: str = ""
    method: str = ""
    preset: str = ""
    not_run: bool = False
    """Whether it says what others have, and that there is no result to stand beside it."""


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    name: str
    """Of its files, such as 'main'."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, or nothing but dashes in the place of some."""
        columns = [[row.cells[i] for row in self.rows] for i in range(len(self.columns))]
        return [
            any(cell.value is not None for cell in column)
            or all(cell.text in ("", NONE) for cell in column)
            for column in columns
        ]


@dataclass(frozen=True)
class Series:
    """What is drawn in one colour or pattern."""

    name: str
    x: tuple[float | str, ...]
    """Positions, or names of places along the axis."""
    y: tuple[float | None, ...]
    """None where there is nothing: a gap."""
    error: tuple[float | None, ...] = ()
    """Standard deviations over seeds, as many as y, or none at all."""
    method: str = ""
    """What the page's switches find it by."""


@dataclass(frozen=True)
class Chart:
    """A figure of the report.

    bars, lines, stacked (bars on each other) and points read every series by x and y. A heat is
    one row a series, by its name, with y as the values along x. A grid is a heat whose cells are
    short texts, in `texts`, by series, the darker the larger the value.
    """

    name: str
    """Of its files, such as 'final-accuracy-permuted-digits'."""
    title: str
    kind: Kind
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    benchmark: str = ""
    method: str = ""
    """Of a chart of one method alone; else its series have methods."""
    preset: str = ""
    z_label: str = ""
    """What the values of a heat or a grid are."""
    texts: tuple[tuple[str, ...], ...] = ()
    boundaries: tuple[tuple[float, str], ...] = ()
    """Places on the x axis where something ends, with its name, such as a task."""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All of it."""

    title: str
    summary: tuple[str, ...]
    """Sentences."""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """What could not be read, a sentence each."""
