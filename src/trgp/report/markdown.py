"""Tables in Markdown: the best in bold, what is near it in italics."""

import re

from .model import Cell, Table
from .naming import clean

MARKS = {"": "{}", "best": "**{}**", "near": "*{}*"}
NOTE = "Bold: best. Italics: near."


def table_markdown(table: Table) -> str:
    """With its title above and its note below."""
    parts = [f"## {escaped(table.title)}", rows_markdown(table)]
    if any(cell.mark for row in table.rows for cell in row.cells):
        parts.append(NOTE)
    if table.note:
        parts.append(escaped(table.note))
    return "\n\n".join(parts) + "\n"


def rows_markdown(table: Table) -> str:
    """The rows alone, columns of numbers to the right."""
    ruler = ["---:" if number else "---" for number in table.numeric]
    lines = [[escaped(name) for name in table.columns], ruler]
    lines += [[_written(cell) for cell in row.cells] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """A text of which Markdown makes nothing else."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", clean(text))


def _written(cell: Cell) -> str:
    return MARKS[cell.mark].format(escaped(cell.text)) if cell.text else ""
