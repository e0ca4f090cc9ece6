"""Order of layers in figures."""

import re
from collections.abc import Iterable


def in_order(layers: Iterable[str]) -> list[str]:
    """Sort layers by name, numbers by value, heads last as in a network."""
    return sorted(layers, key=_place)


def _place(layer: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    parts = re.split(r"(\d+)", layer)
    return layer.startswith("head"), [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts
    ]
