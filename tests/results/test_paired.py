"""The paired t-test against scipy's."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from trgp.results.paired import p_value, two_sided, unpaired

accuracies = st.integers(0, 10_000).map(lambda n: n / 10_000)


@given(pairs=st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=40))
def test_p_is_that_of_scipy(pairs: list[tuple[float, float]]) -> None:
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    assume(len({round(y - x, 9) for x, y in pairs}) > 1)  # else t is nothing but rounding
    assert p_value(a, b) == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-10)
    assert p_value(b, a) == pytest.approx(p_value(a, b), abs=1e-12)


@given(t=st.floats(1e-3, 1e4), n=st.integers(1, 200))
def test_the_tails_are_those_of_scipy(t: float, n: int) -> None:
    assert two_sided(t, n) == pytest.approx(2 * stats.t.sf(t, n), abs=1e-10)


@pytest.mark.parametrize("n", range(1, 8))
def test_the_ends(n: int) -> None:
    assert two_sided(0, n) == 1
    assert two_sided(math.inf, n) == pytest.approx(0, abs=1e-15)


def test_by_hand() -> None:
    """With one degree of freedom T is Cauchy's: d = 1, 3 has t = 2 and p = 1 - 2/pi atan 2."""
    assert p_value([0, 0], [1, 3]) == pytest.approx(1 - 2 / math.pi * math.atan(2))


def test_where_t_is_not_defined() -> None:
    assert p_value([], []) is p_value([0.5], [0.75]) is p_value([0.5, 0.25], [0.5, 0.25]) is None
    assert p_value([0.5, 0.25], [0.75, 0.5]) == 0  # always the same gain


@given(
    st.tuples(st.floats(-10, 10), st.floats(1e-3, 10), st.integers(2, 9)),
    st.tuples(st.floats(-10, 10), st.floats(1e-3, 10), st.integers(2, 9)),
)
def test_two_groups_are_told_apart_as_scipy_does(
    a: tuple[float, float, int], b: tuple[float, float, int]
) -> None:
    expected = stats.ttest_ind_from_stats(*a, *b).pvalue
    assert unpaired(*a, *b) == pytest.approx(expected, abs=1e-10)


def test_groups_without_any_spread() -> None:
    assert unpaired(1.0, 0.0, 3, 1.0, 0.0, 5) == 1
    assert unpaired(1.0, 0.0, 3, 2.0, 0.0, 5) == pytest.approx(0, abs=1e-12)
