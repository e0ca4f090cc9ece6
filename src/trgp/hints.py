"""What a misspelt name may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(given: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    listed = list(known)
    near = get_close_matches(str(given), listed, 1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(listed)}."
