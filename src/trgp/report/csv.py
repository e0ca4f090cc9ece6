"""Tables as CSV: what is read, beside it the numbers in full and the marks, and the commands."""

import csv
import io

from .model import Row, Table


def table_csv(table: Table) -> str:
    """A column of numbers is followed by one with all their digits, one of marks by the marks.

    The last column has what repeats a row's numbers, or runs them.
    """
    columns = [[row.cells[i] for row in table.rows] for i in range(len(table.columns))]
    header: list[str] = []
    written: list[list[str]] = []
    for name, cells in zip(table.columns, columns, strict=True):
        header.append(name)
        written.append(
            [cell.text if cell.value is not None else _inert(cell.text) for cell in cells]
        )
        if any(cell.value is not None for cell in cells):
            header.append(f"{name} (number)")
            written.append(["" if cell.value is None else repr(cell.value) for cell in cells])
        if any(cell.mark for cell in cells):
            header.append(f"{name} (mark)")
            written.append([cell.mark for cell in cells])
    header.append("commands")
    written.append([_inert("; ".join(_commands(row))) for row in table.rows])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *zip(*written, strict=True)])
    return out.getvalue()


def _commands(row: Row) -> list[str]:
    return list(dict.fromkeys(command for cell in row.cells for command in cell.commands))


def _inert(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(tuple("=+-@")) else text
