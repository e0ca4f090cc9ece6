"""What is read off an accuracy matrix, from its definitions and on matrices worked by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trgp.results.metrics import acc, as_matrix, bwt, forgetting, fwt, mean_diagonal, over_seeds

Floats = NDArray[np.float64]

# Three tasks; nothing is evaluated before it is learnt.
LOWER = [[0.9, None, None], [0.95, 0.8, None], [0.7, 0.6, 0.5]]
FULL = [[0.9, 0.3, 0.1], [0.95, 0.8, 0.4], [0.7, 0.6, 0.5]]


@st.composite
def matrices(draw: st.DrawFn, least: int = 1) -> Floats:
    T = draw(st.integers(least, 6))
    rows = st.lists(st.floats(0, 1), min_size=T, max_size=T)
    return np.array(draw(st.lists(rows, min_size=T, max_size=T)))


# ---- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("R", [LOWER, FULL, np.array(LOWER, dtype=float)])
def test_three_tasks_by_hand(R: Any) -> None:
    assert acc(R) == pytest.approx((0.7 + 0.6 + 0.5) / 3)
    assert bwt(R) == pytest.approx((-0.2 - 0.2) / 2)
    assert mean_diagonal(R) == pytest.approx((0.9 + 0.8 + 0.5) / 3)
    assert forgetting(R) == pytest.approx((0.25 + 0.2) / 2)  # the first task was at best 0.95


def test_forward_transfer_by_hand() -> None:
    assert fwt(FULL, [None, 0.1, 0.1]) == pytest.approx((0.2 + 0.3) / 2)


def test_one_task_has_no_past_and_no_future() -> None:
    assert acc([[0.8]]) == mean_diagonal([[0.8]]) == 0.8
    assert bwt([[0.8]]) is forgetting([[0.8]]) is fwt([[0.8]], [0.1]) is None


def test_figures_are_plain_numbers() -> None:
    """They go into JSON as they are."""
    R = np.array(FULL, dtype=np.float32)
    assert {type(f(R)) for f in (acc, bwt, mean_diagonal, forgetting)} == {float}
    assert type(fwt(R, np.array([0.1, 0.1, 0.1]).tolist())) is float


# ---- properties --------------------------------------------------------------------------------


@given(R=matrices(2))
def test_definitions(R: Floats) -> None:
    T = len(R)
    assert acc(R) == pytest.approx(R[-1].mean())
    assert mean_diagonal(R) == pytest.approx(np.trace(R) / T)
    assert bwt(R) == pytest.approx((R[-1] - np.diag(R))[:-1].mean(), abs=1e-12)
    lost = [R[j:-1, j].max() - R[-1, j] for j in range(T - 1)]
    assert forgetting(R) == pytest.approx(np.mean(lost), abs=1e-12)
    b = R[:, 0].tolist()
    gained = [R[j - 1, j] - b[j] for j in range(1, T)]
    assert fwt(R, b) == pytest.approx(np.mean(gained), abs=1e-12)


@given(learnt=st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_without_forgetting(learnt: list[float]) -> None:
    """Every task stays where it was when learnt: nothing is lost and ACC is the mean A_ii."""
    R = np.tile(learnt, (len(learnt), 1))
    assert bwt(R) == forgetting(R) == 0
    assert acc(R) == mean_diagonal(R)


@given(R=matrices(2))
def test_bounds(R: Floats) -> None:
    back, lost = bwt(R), forgetting(R)
    assert back is not None
    assert lost is not None
    assert lost >= -back
    assert -1 <= back <= 1
    assert -1 <= lost <= 1
    assert 0 <= acc(R) <= 1 + 1e-15
    T = len(R)
    assert acc(R) == pytest.approx(mean_diagonal(R) + back * (T - 1) / T, abs=1e-12)


@given(R=matrices(2))
def test_two_tasks_or_monotone_decline_lose_what_transfer_says(R: Floats) -> None:
    """Where no task ever rises again, its best is R[j, j] and forgetting is -BWT."""
    falling = np.minimum.accumulate(np.where(np.tri(len(R)) > 0, R, 1.0), axis=0)
    for A in (falling, R[:2, :2]):
        back = bwt(A)
        assert back is not None
        assert forgetting(A) == -back


@given(R=matrices())
def test_only_what_is_needed_is_read(R: Floats) -> None:
    """The future of a task is not looked at, nor its input changed."""
    partial = np.where(np.tri(len(R)) > 0, R, np.nan)
    before = partial.copy()
    for f in (acc, bwt, mean_diagonal, forgetting):
        assert f(partial) == f(R)
    np.testing.assert_array_equal(partial, before)


@given(R=matrices())
def test_lists_as_json_has_them_are_the_same(R: Floats) -> None:
    listed = [[x if j <= i else None for j, x in enumerate(r)] for i, r in enumerate(R.tolist())]
    np.testing.assert_array_equal(as_matrix(listed), np.where(np.tri(len(R)) > 0, R, np.nan))


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("R", "message"),
    [
        ([], "empty"),
        ([[]], "empty"),
        (np.zeros((0, 0)), "empty"),
        ([0.5, 0.5], "square, tasks by tasks, not 2"),
        ([[0.5, 0.5]], "square, tasks by tasks, not 1x2"),
        (0.5, "square, tasks by tasks, not a single number"),
        (np.zeros((2, 2, 2)), "square, tasks by tasks, not 2x2x2"),
        ([[0.5], [0.5, 0.5]], "same length"),
        ([["good"]], "rows of numbers"),
        ([[{}]], "rows of numbers"),
        ([[0.5, None], [0.5, 97.0]], r"R\[1, 1\] is 97; accuracies are fractions in \[0, 1\]"),
        ([[-0.1]], r"R\[0, 0\] is -0.1"),
        ([[math.inf]], r"R\[0, 0\] is inf"),
    ],
)
@pytest.mark.parametrize("figure", [acc, bwt, mean_diagonal, forgetting])
def test_what_is_no_accuracy_matrix(figure: Callable[..., Any], R: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figure(R)


@pytest.mark.parametrize(
    ("figure", "i", "j"),
    [
        (acc, 2, 1),
        (bwt, 2, 0),
        (bwt, 1, 1),
        (mean_diagonal, 0, 0),
        (forgetting, 1, 0),
        (forgetting, 2, 1),
        (lambda R: fwt(R, [0.1] * 3), 1, 2),
    ],
)
@pytest.mark.parametrize("missing", [None, math.nan])
def test_missing_entries_are_named(
    figure: Callable[..., Any], i: int, j: int, missing: float | None
) -> None:
    R: list[list[float | None]] = [list(row) for row in FULL]
    R[i][j] = missing
    with pytest.raises(
        ValueError, match=rf"R\[{i}, {j}\] is missing: task {j} .* learning task {i}"
    ):
        figure(R)


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ([0.1], "1 accuracies for 3 tasks"),
        ([0.1, None, 0.1], "baseline of task 1 is None"),
        ([0.1, 0.1, 10.0], r"baseline of task 2 is 10.0; it must be an accuracy in \[0, 1\]"),
    ],
)
def test_baselines_that_do_not_fit(baseline: list[float | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fwt(FULL, baseline)


# ---- seeds -------------------------------------------------------------------------------------

figures = st.lists(st.floats(-1, 1), min_size=1, max_size=8)


@given(values=figures, data=st.data())
def test_the_order_of_seeds_does_not_matter(values: list[float], data: st.DataObject) -> None:
    assert over_seeds(data.draw(st.permutations(values))) == over_seeds(values)


@given(values=figures.filter(lambda v: len(v) > 1))
def test_mean_and_sample_deviation(values: list[float]) -> None:
    mean, std, seeds = over_seeds(values)
    assert seeds == len(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-12)
    assert std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


@given(value=st.floats(-1, 1), seeds=st.integers(2, 6))
def test_equal_seeds_do_not_deviate(value: float, seeds: int) -> None:
    mean, std, _ = over_seeds([value] * seeds)
    assert mean == pytest.approx(value)
    assert std == 0


def test_one_seed_has_a_mean_alone() -> None:
    assert over_seeds([0.5]) == (0.5, None, 1)


@pytest.mark.parametrize("undefined", [None, math.nan])
def test_undefined_figures(undefined: float | None) -> None:
    assert over_seeds([undefined, undefined]) == (None, None, 2)
    with pytest.raises(ValueError, match="1 of 2 seeds have no value"):
        over_seeds([0.5, undefined])


@pytest.mark.parametrize(
    ("values", "message"), [([], "no seed"), ([0.5, math.inf], "infinite value")]
)
def test_no_mean_over_these(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        over_seeds(values)
