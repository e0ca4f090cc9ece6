"""Commands that the tests give, and what comes back."""

from collections.abc import Callable
from typing import NamedTuple

SMALL = ("permuted-digits", "--tasks", "2", "--epochs", "1")


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Trgp = Callable[..., Said]
