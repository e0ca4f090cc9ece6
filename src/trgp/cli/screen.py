"""Print tables to stdout and sentences to stderr, safe for any terminal, file or pipe."""

import sys
from typing import IO

from rich.console import Console, RenderableType

from ..results.layout import plain

UNBOUNDED = 1000  # columns, for a file or a pipe


def show(content: RenderableType, file: IO[str] | None = None) -> None:
    """Print to stdout, or to another stream."""
    file = file or sys.stdout
    width = None if file.isatty() else UNBOUNDED
    console = Console(file=file, width=width, highlight=False)
    with console.capture() as captured:
        console.print(content)
    # Tables pad their last column with blanks.
    lines = captured.get().splitlines()
    file.write("".join(line.rstrip() + "\n" for line in lines))
    file.flush()


def tell(sentence: object) -> None:
    """Print a sentence to stderr."""
    print(f"trgp: {printable(sentence)}", file=sys.stderr, flush=True)


def printable(text: object) -> str:
    """Spell out control characters, so that a name cannot send commands to the terminal."""
    return "\n".join(plain(line).plain for line in str(text).split("\n"))
