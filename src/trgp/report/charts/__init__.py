"""Describe the figures of the report from stored results."""

from collections.abc import Iterator, Sequence

from ...results.result import Results
from ..groups import by_benchmark, compared
from ..model import Chart
from .accuracy_memory import accuracy_memory
from .curves import curves
from .evolution import evolution
from .final_accuracy import final_accuracy
from .matrix import matrix
from .phases import phases
from .ranks import ranks
from .scopes import scopes
from .selection import selection


def charts(found: Sequence[Results]) -> Iterator[Chart]:
    """Yield the figures over methods, then those of every configuration."""
    for group in compared(found):
        yield final_accuracy(group)
        yield from evolution(group)
        if len(group.members) > 1:
            yield accuracy_memory(group)
    yield from scopes(found)
    for results in by_benchmark(found):
        yield matrix(results)
        for of_some in (curves, selection, ranks, phases):
            chart = of_some(results)
            if chart is not None:
                yield chart
