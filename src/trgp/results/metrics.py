"""Compute ACC, BWT, mean A_ii, forgetting, FWT and their spread from the accuracy matrix.

R[i, j] is the accuracy on task j after learning task i, a fraction of 1, and None or NaN where it
was not evaluated. Tasks are counted from 0 in code and from 1 to T in the formulas.
"""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import matrix_figures

Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]


def as_matrix(R: Matrix) -> NDArray[np.float64]:
    """Return R as a T x T array with NaN where nothing was evaluated; refuse anything else."""
    try:
        A = np.array(R, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "The accuracy matrix must have rows of numbers (None where not evaluated), all of the "
            "same length."
        ) from error
    if A.size == 0:
        raise ValueError("The accuracy matrix is empty; it needs at least one task.")
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        shape = "x".join(map(str, A.shape)) or "a single number"
        raise ValueError(f"The accuracy matrix must be square, tasks by tasks, not {shape}.")
    wrong = np.argwhere(~np.isnan(A) & ~((A >= 0) & (A <= 1)))
    if len(wrong):
        i, j = wrong[0]
        raise ValueError(f"R[{i}, {j}] is {A[i, j]:g}; accuracies are fractions in [0, 1].")
    return A


def acc(R: Matrix) -> float:
    """ACC = 1/T sum_j R[T, j]: the mean accuracy over all tasks after the last one."""
    A = as_matrix(R)
    return matrix_figures.acc(partial(_entry, A), len(A))


def bwt(R: Matrix) -> float | None:
    """BWT = 1/(T-1) sum_{i<T} R[T, i] - R[i, i]: the effect of later tasks on old ones.

    Negative if tasks are forgotten; None for a single task.
    """
    A = as_matrix(R)
    return matrix_figures.bwt(partial(_entry, A), len(A))


def mean_diagonal(R: Matrix) -> float:
    """Mean A_ii = 1/T sum_i R[i, i]: the mean accuracy on each task right after it is learnt."""
    A = as_matrix(R)
    return statistics.fmean(_entry(A, i, i) for i in range(len(A)))


def forgetting(R: Matrix) -> float | None:
    """F = 1/(T-1) sum_{j<T} (max_{j<=i<T} R[i, j] - R[T, j]): the mean loss from the best.

    At least -BWT, since a task's best is no worse than R[j, j]; None for a single task.
    """
    A = as_matrix(R)
    return matrix_figures.forgetting(partial(_entry, A), len(A))


def fwt(R: Matrix, baseline: Sequence[float | None]) -> float | None:
    """FWT = 1/(T-1) sum_{j>1} R[j-1, j] - b_j: what old tasks add on a task not yet learnt.

    b_j is the accuracy on task j of the initialised network; b_1 is not used. None for a
    single task.
    """
    A = as_matrix(R)
    T = len(A)
    if len(baseline) != T:
        raise ValueError(f"The baseline has {len(baseline)} accuracies for {T} tasks.")
    b = [math.nan if value is None else float(value) for value in baseline]
    for j in range(1, T):
        if not 0 <= b[j] <= 1:
            raise ValueError(
                f"The baseline of task {j} is {baseline[j]}; it must be an accuracy in [0, 1]."
            )
    return matrix_figures.mean(_entry(A, j - 1, j) - b[j] for j in range(1, T))


class Spread(NamedTuple):
    """A figure over seeds; None where it is not defined."""

    mean: float | None
    std: float | None
    seeds: int


def over_seeds(values: Sequence[float | None]) -> Spread:
    """Return mean and sample standard deviation, sqrt(sum (v - mean)^2 / (n-1)), over seeds.

    One seed has no deviation. A figure that no seed defines (None or NaN, like the BWT of one task)
    has no mean. A figure that only some seeds define is refused, because its mean would mislead.
    """
    if len(values) == 0:
        raise ValueError("There is no seed to take a mean over; give at least one.")
    defined = [float(v) for v in values if v is not None and not math.isnan(v)]
    if not defined:
        return Spread(None, None, len(values))
    if len(defined) < len(values):
        missing = len(values) - len(defined)
        raise ValueError(f"{missing} of {len(values)} seeds have no value for this figure.")
    if not all(map(math.isfinite, defined)):
        raise ValueError("An infinite value has no mean over seeds.")
    std = statistics.stdev(defined) if len(defined) > 1 else None
    return Spread(statistics.fmean(defined), std, len(defined))


def _entry(A: NDArray[np.float64], i: int, j: int) -> float:
    value = float(A[i, j])
    if math.isnan(value):
        raise ValueError(
            f"R[{i}, {j}] is missing: task {j} was not evaluated after learning task {i}."
        )
    return value
