"""Where tables go: as wide as the terminal, or as they need where a file or a pipe reads them."""

import sys
from typing import IO

from rich.console import Console, RenderableType

UNBOUNDED = 1000  # columns, where nobody looks at a screen


def show(content: RenderableType, file: IO[str] | None = None) -> None:
    """Print to stdout, or to another stream."""
    file = file or sys.stdout
    width = None if file.isatty() else UNBOUNDED
    console = Console(file=file, width=width, highlight=False)
    with console.capture() as captured:
        console.print(content)
    # Tables fill their cells with blanks, of which the last are of no use to anybody.
    lines = captured.get().splitlines()
    file.write("".join(line.rstrip() + "\n" for line in lines))
    file.flush()
