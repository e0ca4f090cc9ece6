"""Write tables as Markdown: best in bold, near in italics."""

import re

from .model import Cell, Table
from .naming import clean

MARKS = {"": "{}", "best": "**{}**", "near": "*{}*"}
NOTE = "Bold: best. Italics: near."


def table_markdown(table: Table) -> str:
    """Return a table with its title above and its note below."""
    parts = [f"## {escaped(table.title)}", rows_markdown(table)]
    if any(cell.mark for row in table.rows for cell in row.cells):
        parts.append(NOTE)
    if table.note:
        parts.append(escaped(table.note))
    return "\n\n".join(parts) + "\n"


def rows_markdown(table: Table) -> str:
    """Return the rows alone, columns of numbers aligned to the right."""
    ruler = ["---:" if number else "---" for number in table.numeric]
    lines = [[escaped(name) for name in table.columns], ruler]
    lines += [[_written(cell) for cell in row.cells] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Escape a text so that Markdown shows it verbatim."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", clean(text))


def _written(cell: Cell) -> str:
    return MARKS[cell.mark].format(escaped(cell.text)) if cell.text else ""
