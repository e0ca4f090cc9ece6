"""Long sums in parts: every program sums one part, and the parts are added up in order.

The same input therefore gives the same bits every time, which atomic sums do not ensure.
"""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # that a program adds up at once: as many as fit it well


def add_up(parts: Tensor, whole: Tensor, channels: int = 1, taps: int = 1) -> None:
    """Sum `parts` over the first axis, into `whole`.

    Args:
        taps: the rows of the parts are (taps, channels), and become (channels, taps).
    """
    count, each = len(parts), whole.numel()
    tall = min(128, triton.next_power_of_2(count))
    wide = NUMBERS // tall
    _add_up[(triton.cdiv(each, wide),)](parts, whole, count, each, channels, taps, wide, tall)


@triton.jit
def _add_up(
    parts, whole, number, count,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read in the order of the parts, since there are many, and write in the other order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, number, ROWS):
        p = start + tl.arange(0, ROWS)
        inside = (p < number)[:, None] & (i < count)[None, :]
        at = p[:, None] * count + i[None, :]
        total += tl.sum(tl.load(parts + at, mask=inside, other=0.0), 0)
    place = i
    if TAPS > 1:
        place = i // (C * TAPS) * (C * TAPS) + i % C * TAPS + i // C % TAPS
    tl.store(whole + place, total, mask=i < count)
