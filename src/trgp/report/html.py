"""Write tables as HTML: best in strong, near in em, with commands and notes."""

from html import escape

from .model import Cell, Row, Table

MARKS = {"": "{}", "best": "<strong>{}</strong>", "near": "<em>{}</em>"}


def table_html(table: Table) -> str:
    """Return a table to embed in a page, with every text escaped."""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    lines = [
        f'<table id="{escape(table.name)}">',
        f"<caption>{escape(table.title)}</caption>",
        f"<thead><tr>{names}</tr></thead>",
        "<tbody>",
        *map(_row, table.rows),
        "</tbody>",
    ]
    if table.note:
        span = len(table.columns)
        lines.append(f'<tfoot><tr><td colspan="{span}">{escape(table.note)}</td></tr></tfoot>')
    return "\n".join([*lines, "</table>", ""])


def table_file(table: Table) -> str:
    """Return a table as a file of its own, with its encoding declared."""
    return f'<!DOCTYPE html>\n<meta charset="utf-8">\n{table_html(table)}'


def _row(row: Row) -> str:
    names = (("benchmark", row.benchmark), ("method", row.method), ("preset", row.preset))
    data = "".join(f' data-{name}="{escape(text)}"' for name, text in names if text)
    return f"<tr{data}>{''.join(map(_cell, row.cells))}</tr>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    told = " | ".join(filter(None, (cell.note, *cell.commands)))
    title = f' title="{escape(told)}"' if told else ""
    return f"<td{value}{title}>{MARKS[cell.mark].format(escape(cell.text))}</td>"
