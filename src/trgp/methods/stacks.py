"""The batches of a finished task, many at a time, for what is computed of each by itself."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from .base import Batch, Context

SAMPLES = 1024  # at a time: more would not be faster, but fill the memory
T = TypeVar("T")


def stacks(ctx: Context, size: int, purpose: str, most: int | None = None) -> Iterator[Batch]:
    """The batches of `ctx.batches(size, purpose)`, at most so many on each other.

    Their x are (k, size, ...), their y (k, size). A last batch of another size comes alone.
    """
    together = max(1, SAMPLES // size if most is None else min(most, SAMPLES // size))
    for piece in ctx.batches(size * together, purpose):
        full, rest = divmod(len(piece.y), size)
        if full and rest == 1:
            full -= 1  # a last sample has joined the batch before
        inside = slice(0, full * size), slice(full * size, None)
        for part, count in zip(inside, (full, 1), strict=True):
            x, y = piece.x[part], piece.y[part]
            if len(y):
                yield piece._replace(x=x.unflatten(0, (count, -1)), y=y.unflatten(0, (count, -1)))


def batch_count(samples: int, size: int) -> int:
    """How many batches there are in all."""
    return max(1, samples // size + (samples % size > 1))


def each(f: Callable[..., T], *stacked: Any) -> T:
    """What f makes of every entry of tensors (k, ...), stacked again: in one pass if possible.

    A batch is computed as if it were alone, so that BatchNorm sees its samples and no others.
    """
    try:
        return torch.vmap(f)(*stacked)
    except RuntimeError:  # of a network that looks at values, draws numbers or cannot be vmapped
        (*_, last) = stacked
        parts = [tree_map(itemgetter(k), stacked) for k in range(len(last))]
        together: T = tree_map(lambda *found: torch.stack(found), *(f(*part) for part in parts))
        return together
