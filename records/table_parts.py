"""Parts of the tables that are made from the records."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from recorded import Found, Wanted, recorded

from trgp.benchmarks import PAPER
from trgp.report import cells
from trgp.report.markdown import escaped, rows_markdown
from trgp.report.model import Cell, Row, Table


def with_missing(
    table: Table,
    found: Found,
    wanted: Iterable[Wanted],
    printed: Mapping[str, Callable[[Wanted], Cell]],
) -> Table:
    """The table with a row for what is wanted and neither recorded nor said to lack already."""
    lacking = {(row.benchmark, row.method, row.preset) for row in table.rows if row.not_run}
    rows = list(table.rows)
    for each in wanted:
        if recorded(found, each) is None and each[:3] not in lacking:
            names = {
                key: cells.text(getattr(each, key)) for key in ("benchmark", "method", "preset")
            }
            made = names | {column: make(each) for column, make in printed.items()}
            row = tuple(made.get(column, cells.EMPTY) for column in table.columns)
            rows.append(Row(row, *each[:3], not_run=True))
    return Table(table.name, table.title, table.columns, tuple(rows), table.note)


def without(table: Table, column: str) -> Table:
    """The table less a column."""
    at = table.columns.index(column)
    rows = tuple(Row(row.cells[:at] + row.cells[at + 1 :]) for row in table.rows)
    return Table(table.name, table.title, table.columns[:at] + table.columns[at + 1 :], rows)


def noted(table: Table) -> str:
    """The rows with the note below."""
    return f"{rows_markdown(table)}\n\n{escaped(table.note)}"


def texts(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words."""
    made = tuple(Row(tuple(map(cells.text, row))) for row in rows)
    return rows_markdown(Table("", "", tuple(header), made))


def papers_acc(wanted: Wanted) -> Cell:
    """What the paper prints for the method on the benchmark."""
    paper = PAPER[wanted.benchmark].get(wanted.method)
    return cells.EMPTY if paper is None else cells.percent(paper.acc, paper.std)


def figure(value: float | None, form: str) -> Cell:
    """A number in a form, or a dash."""
    return cells.EMPTY if value is None else cells.number(value, f"{value:{form}}")
