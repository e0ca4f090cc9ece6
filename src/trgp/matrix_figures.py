"""ACC, BWT and forgetting of a matrix of scores: R(i, j) scores task j after learning task i.

Only entries with i >= j are read; tasks are counted from 0 to T - 1.
"""

import statistics
from collections.abc import Callable, Iterable

Entry = Callable[[int, int], float]


def acc(R: Entry, T: int) -> float:
    """1/T sum_j R(T-1, j): the mean over all tasks after the last one."""
    return statistics.fmean(R(T - 1, j) for j in range(T))


def bwt(R: Entry, T: int) -> float | None:
    """1/(T-1) sum_j R(T-1, j) - R(j, j) without the last task; None for a single one."""
    return mean(R(T - 1, j) - R(j, j) for j in range(T - 1))


def forgetting(R: Entry, T: int) -> float | None:
    """1/(T-1) sum_j max_i R(i, j) - R(T-1, j) over j <= i < T-1; None for a single task."""
    return mean(max(R(i, j) for i in range(j, T - 1)) - R(T - 1, j) for j in range(T - 1))


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None if there are no values."""
    listed = list(values)
    return statistics.fmean(listed) if listed else None
