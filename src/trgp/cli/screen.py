"""Tables as wide as the terminal, or as a file or a pipe needs them, and sentences for stderr."""

import sys
from typing import IO

from rich.console import Console, RenderableType

from ..results.layout import plain

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


def tell(sentence: object) -> None:
    """Print a sentence to stderr."""
    print(f"trgp: {printable(sentence)}", file=sys.stderr, flush=True)


def printable(text: object) -> str:
    """Lines with control characters spelt out: the name of a folder is no command to a terminal."""
    return "\n".join(plain(line).plain for line in str(text).split("\n"))
