"""The units of a network, which HAT gates and growing methods count."""

from typing import NamedTuple

HEADS = "heads"


class Gate(NamedTuple):
    """Units between layers: channels of maps, or entries of a vector."""

    name: str
    """The module whose input the units are, or 'heads' for the head in use."""
    units: int
    producers: tuple[str, ...]
    """The layers and norm layers whose outputs the units are."""
    consumers: tuple[str, ...]
    """The layers that read the units: the module, inside it, or after it if it has no weights."""

    def module(self, head: int) -> str:
        """The module whose input is gated."""
        return f"{HEADS}.{head}" if self.name == HEADS else self.name
