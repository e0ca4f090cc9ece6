"""Tables and charts as plain data, before they are written or drawn.

Every chart is described once and drawn twice: by matplotlib for files, and by the page, where it
is interactive. Accuracies are in per cent here, and tasks are counted from 1.
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
    """The text to show; may be empty."""
    value: float | None = None
    """The number that rows are sorted by, if there is one."""
    mark: Mark = ""
    """best of its group, or near: not significantly different by a paired test over seeds."""
    commands: tuple[str, ...] = ()
    """The commands that repeat the number, or that would run it."""
    note: str = ""
    """Further information, such as a p-value."""


@dataclass(frozen=True)
class Row:
    """A row, with the names that filters select by."""

    cells: tuple[Cell, ...]
    benchmark: str = ""
    method: str = ""
    preset: str = ""
    not_run: bool = False
    """Whether it only has published figures, because there is no result."""


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    name: str
    """Base name of its files, such as 'main'."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, or only dashes in place of numbers."""
        columns = [[row.cells[i] for row in self.rows] for i in range(len(self.columns))]
        return [
            any(cell.value is not None for cell in column)
            or all(cell.text in ("", NONE) for cell in column)
            for column in columns
        ]


@dataclass(frozen=True)
class Series:
    """Data drawn in one colour or pattern."""

    name: str
    x: tuple[float | str, ...]
    """Positions, or names, along the axis."""
    y: tuple[float | None, ...]
    """Values; None makes a gap."""
    error: tuple[float | None, ...] = ()
    """Standard deviations over seeds: one per y, or empty."""
    method: str = ""
    """The method that the page's filters select by."""


@dataclass(frozen=True)
class Chart:
    """A figure of the report.

    bars, lines, stacked (bars on each other) and points read every series by x and y. A heat has
    one row per series, with y as the values along x. A grid is a heat whose cells are short texts,
    in `texts` by series; darker means a larger value.
    """

    name: str
    """Base name of its files, such as 'final-accuracy-permuted-digits'."""
    title: str
    kind: Kind
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    benchmark: str = ""
    method: str = ""
    """The method of a chart of one method; otherwise the series have methods."""
    preset: str = ""
    z_label: str = ""
    """Label of the values of a heat or a grid."""
    texts: tuple[tuple[str, ...], ...] = ()
    boundaries: tuple[tuple[float, str], ...] = ()
    """Positions on the x axis where something ends, such as a task, with its name."""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    summary: tuple[str, ...]
    """Sentences."""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """Sentences about results that could not be read."""
