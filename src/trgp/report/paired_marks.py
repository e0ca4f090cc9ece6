"""Mark the best configurations and those not significantly different, by paired tests."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..results.paired import p_value
from ..results.result import Result, Results
from .groups import BOUNDS
from .model import Mark

LEVEL = 0.05
Measure = Callable[[Result], float | None]


class Difference(NamedTuple):
    """The mean difference over the seeds two configurations share, and its p-value."""

    mean: float
    p: float | None
    """None if no test is possible: for one seed, or if all seeds agree to the bit."""
    seeds: int


class Verdict(NamedTuple):
    """The rank of a configuration in its group."""

    mark: Mark
    p: float | None
    note: str
    best: Results | None = None
    """The configuration that p compares with."""


def difference(before: Results, after: Results, measure: Measure) -> Difference | None:
    """Return after - before; None if they share no seed or the measure is not defined."""
    a, b = ({run.seed: measure(run) for run in side} for side in (before, after))
    pairs = [(x, y) for s in a if s in b if (x := a[s]) is not None and (y := b[s]) is not None]
    if not pairs:
        return None
    mean = sum(y - x for x, y in pairs) / len(pairs)
    return Difference(mean, p_value([x for x, _ in pairs], [y for _, y in pairs]), len(pairs))


def verdicts(group: Sequence[Results], measure: Measure) -> list[Verdict]:
    """Mark the highest mean as best; near means no significant difference (paired test, 5 %).

    Reference points are not ranked. A configuration that shares fewer than two seeds with the best
    is not tested; its note says so.
    """
    means = [_mean(results, measure) for results in group]
    ranked = [
        (mean, i)
        for i, (results, mean) in enumerate(zip(group, means, strict=True))
        if mean is not None and results[0].method not in BOUNDS
    ]
    if len(ranked) < 2:
        return [Verdict("", None, "")] * len(group)
    best = max(ranked)[1]
    part = {i for _, i in ranked}
    return [
        _verdict(group[best], results, measure, i == best) if i in part else Verdict("", None, "")
        for i, results in enumerate(group)
    ]


def _verdict(best: Results, other: Results, measure: Measure, is_best: bool) -> Verdict:
    if is_best:
        one = " (of one seed)" if len(other) == 1 else ""
        return Verdict("best", None, f"highest mean{one}")
    gap = difference(best, other, measure)
    if gap is None or gap.seeds < 2:
        return Verdict("", None, "no test: fewer than two seeds in common with the best")
    if gap.p is None:
        return Verdict("near", None, f"equal to the best in all {gap.seeds} seeds")
    note = f"p = {gap.p:.2g} against the best over {gap.seeds} seeds"
    return Verdict("near" if gap.p >= LEVEL else "", gap.p, note, best)


def _mean(results: Results, measure: Measure) -> float | None:
    values = [value for value in map(measure, results) if value is not None]
    return sum(values) / len(values) if len(values) == len(results) else None
