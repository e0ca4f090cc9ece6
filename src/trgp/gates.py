"""Where a network's units are: what HAT gates."""

from typing import NamedTuple

HEADS = "heads"


class Gate(NamedTuple):
    """Units between layers: channels of maps, or the numbers of a vector."""

    name: str
    """The module whose input they are, or 'heads' for the head in use."""
    units: int
    producers: tuple[str, ...]
    """The layers and norm layers whose outputs they are."""
    consumers: tuple[str, ...]
    """The layers that see them: that module, inside it, or after it where it has no weights."""

    def module(self, head: int) -> str:
        """The module whose input is gated."""
        return f"{HEADS}.{head}" if self.name == HEADS else self.name
