"""What a misspelt name may have meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trgp.lookup import meant

KNOWN = ["threshold", "epochs", "epsilon", "patience"]


@given(st.sampled_from(KNOWN), st.integers(0, 8))
def test_one_letter_too_few_is_forgiven(name: str, place: int) -> None:
    wrong = name[:place] + name[place + 1 :]
    assert meant(wrong, KNOWN) == f"did you mean '{name}'?"


@pytest.mark.parametrize("given", ["zzz", "", 3, None, ["epochs", "epochs"], object()])
def test_what_is_like_nothing_is_told_everything(given: object) -> None:
    assert meant(given, KNOWN) == "known are threshold, epochs, epsilon, patience."


def test_names_may_come_from_anything_that_iterates() -> None:
    assert meant("epoch", iter(KNOWN)) == "did you mean 'epochs'?"
    assert meant("zzz", dict.fromkeys(KNOWN)) == meant("zzz", tuple(KNOWN))
