"""How series are told apart in figures, with colours and without.

Methods keep theirs in every figure.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .model import Series

# Okabe and Ito's colours, which the colour-blind tell apart; yellow is too faint for a line. The
# first two are for the first two alone.
COLOURS = ("#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#888888")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "osD^vPX*<>hpdH8"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo")
METHODS = (
    "trgp",
    "gpm",
    "finetune",
    "multitask",
    "single",
    "er",
    "ewc",
    "hat",
    "owm",
    "agem",
    "lwf",
    "pnn",
    "den",
    "rcl",
    "apd",
)


class Style(NamedTuple):
    """How one series is drawn."""

    colour: str
    dashes: Any
    marker: str
    hatch: str


def styles(series: Sequence[Series]) -> Iterator[Style]:
    """A method's own where it is the only one of its method, else one that nobody has yet."""
    methods = [each.method for each in series]
    taken = {METHODS.index(m) for m in methods if m in METHODS and methods.count(m) == 1}
    free = (i for i in range(len(METHODS) + len(series)) if i not in taken)
    for method in methods:
        own = method in METHODS and methods.count(method) == 1
        yield _style(METHODS.index(method) if own else next(free))


def _style(i: int) -> Style:
    """Colours, dashes and markers come round at different times: no two of many look alike."""
    return Style(
        COLOURS[i if i < 2 else 2 + (i - 2) % (len(COLOURS) - 2)],
        DASHES[i % len(DASHES)],
        MARKERS[i % len(MARKERS)],
        HATCHES[i % len(HATCHES)],
    )
