"""Windows on maps."""

from collections.abc import Sequence


def sides_after(
    sides: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    """Return the number of windows in each direction."""
    down, across = (
        (side + 2 * more - width) // step + 1
        for side, width, step, more in zip(sides, kernel, stride, padding, strict=True)
    )
    return down, across
