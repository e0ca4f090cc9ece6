"""Format figures and stored texts for the screen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..tree import in_units
from .metrics import Spread

NONE = "–"
SHORT = 60  # characters kept of a long text
NAME = 30  # most columns of a layer's name


def plain(value: object) -> Text:
    """Return a text verbatim: no markup, no emoji, control characters spelt out."""
    return Text("".join(c if c.isprintable() else _spelt(c) for c in str(value)))


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shown(value: Any) -> str:
    """Return a setting's value as typed on the command line."""
    return ",".join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)


def settings(changed: Mapping[str, Any]) -> str:
    """Return settings in one line."""
    return ", ".join(f"{key}={shown(value)}" for key, value in changed.items())


def shortened(text: str) -> str:
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def points(value: float | None, sign: str = "") -> str:
    """Format a fraction in per cent, or a difference in points; sign: "+" to show it."""
    return NONE if value is None else f"{100 * value:{sign}z.2f}"


def spread(figure: Spread, between: str = " ± ") -> str:
    """Format mean and standard deviation over seeds; one seed has no deviation."""
    if figure.std is None:
        return points(figure.mean)
    return f"{points(figure.mean)}{between}{points(figure.std)}"


def chance(p: float | None) -> str:
    """Format a p-value."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def size(count: float) -> str:
    """Format bytes in readable units."""
    return in_units(round(count))


def duration(seconds: float) -> str:
    """Format a time in readable units."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def table(names: Sequence[str], numbers: Sequence[str], *, title: str = "", gap: int = 2) -> Table:
    """Make an empty table: columns of names, which may fold, then columns of numbers."""
    made = Table(
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
    )
    for name in names:
        made.add_column(plain(name), overflow="fold")
    for name in numbers:
        made.add_column(plain(name), justify="right", no_wrap=True)
    return made


def pairs(rows: Mapping[str, object]) -> Table:
    """Make a table of names and values without a header."""
    made = table(["", ""], [])
    made.show_header = False
    for name, value in rows.items():
        made.add_row(Text(name, style="bold"), plain(value))
    return made


def stacked(parts: Sequence[RenderableType]) -> Group:
    """Join parts vertically, a blank line after each."""
    return Group(*(line for part in parts for line in (part, Text())))


@dataclass(frozen=True)
class Grid:
    """One cell per row and task, tasks counted from 1, split into tables that fit the width."""

    title: str
    corner: str
    rows: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(len(cells) for _, cells in self.rows)
        wide = max(len(cell) for _, cells in self.rows for cell in (*cells, str(count)))
        names = min(max(len(self.corner), *(len(name) for name, _ in self.rows)), NAME)
        each = max(1, (options.max_width - names - 1) // (wide + 1))
        yield Text(self.title, style="bold")
        for start in range(0, count, each):
            tasks = [str(t + 1) for t in range(start, min(start + each, count))]
            made = table([self.corner], tasks, gap=1)
            made.columns[0].max_width = NAME
            for name, cells in self.rows:
                part = list(cells[start : start + each])
                if any(part):
                    made.add_row(plain(name), *map(plain, part))
            yield made
