"""Batches of a finished task, processed many at a time but independently of each other."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from .base import Batch, Context

SAMPLES = 1024  # per pass; more would fill the memory without being faster
T = TypeVar("T")


def stacks(ctx: Context, size: int, purpose: str, most: int | None = None) -> Iterator[Batch]:
    """Stack the batches of `ctx.batches(size, purpose)`, at most `most` at a time.

    Each x is (k, size, ...), each y (k, size). A last batch of another size is a stack of one.
    """
    together = max(1, SAMPLES // size if most is None else min(most, SAMPLES // size))
    for piece in ctx.batches(size * together, purpose):
        full, rest = divmod(len(piece.y), size)
        if full and rest == 1:
            full -= 1  # a single last sample is merged into the previous batch
        inside = slice(0, full * size), slice(full * size, None)
        for part, count in zip(inside, (full, 1), strict=True):
            x, y = piece.x[part], piece.y[part]
            if len(y):
                yield piece._replace(x=x.unflatten(0, (count, -1)), y=y.unflatten(0, (count, -1)))


def batch_count(samples: int, size: int) -> int:
    """Number of batches of the train samples."""
    return max(1, samples // size + (samples % size > 1))


def each(f: Callable[..., T], *stacked: Any) -> T:
    """Apply f to every entry of tensors (k, ...) and stack the results, in one pass if possible.

    Each batch is computed independently, so that BatchNorm sees only the samples of that batch.
    """
    try:
        return torch.vmap(f)(*stacked)
    except RuntimeError:  # the network branches on values, draws numbers or cannot be vmapped
        (*_, last) = stacked
        parts = [tree_map(itemgetter(k), stacked) for k in range(len(last))]
        together: T = tree_map(lambda *found: torch.stack(found), *(f(*part) for part in parts))
        return together
