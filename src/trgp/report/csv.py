"""Write tables as CSV: texts, full numbers, marks and commands."""

import csv
import io

from .model import Row, Table


def table_csv(table: Table) -> str:
    """Write a table; numbers get a second column with all digits, marks one of their own.

    The last column has the commands that repeat a row's numbers, or run missing ones.
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
    """Return a text that no spreadsheet reads as a formula."""
    return f"'{text}" if text.startswith(tuple("=+-@")) else text
