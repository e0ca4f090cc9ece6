"""Styles that distinguish series in figures, with colours and without.

A method has the same style in every figure.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .model import Series

# Okabe and Ito's colours, which colour-blind readers can distinguish; yellow is too faint for a
# line. The first two colours are reserved for the first two methods.
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
    """The style of one series."""

    colour: str
    dashes: Any
    marker: str
    hatch: str


def styles(series: Sequence[Series]) -> Iterator[Style]:
    """Yield a style per series: its method's if that occurs once, else an unused one."""
    methods = [each.method for each in series]
    taken = {METHODS.index(m) for m in methods if m in METHODS and methods.count(m) == 1}
    free = (i for i in range(len(METHODS) + len(series)) if i not in taken)
    for method in methods:
        own = method in METHODS and methods.count(method) == 1
        yield _style(METHODS.index(method) if own else next(free))


def _style(i: int) -> Style:
    """Return style i; colours, dashes and markers repeat with different periods."""
    return Style(
        COLOURS[i if i < 2 else 2 + (i - 2) % (len(COLOURS) - 2)],
        DASHES[i % len(DASHES)],
        MARKERS[i % len(MARKERS)],
        HATCHES[i % len(HATCHES)],
    )
