"""An epoch's batches by index."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Tensors
from ..draws import order
from ..methods.base import Batch


class Part(NamedTuple):
    """Samples that are learnt together, as one task."""

    task: int
    head: int
    samples: Tensors


def cuts(n: int, size: int) -> list[slice]:
    """0 to n in pieces of a size; a last piece of one, where they are larger, joins that before.

    BatchNorm has no statistics of a single sample.
    """
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1 < size:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]


def orders_of(parts: Sequence[Part], *key: int | str) -> list[Tensor]:
    """The samples of every part in the order of a key."""
    return [order(len(part.samples), *key, i) for i, part in enumerate(parts)]


def pieces_of(parts: Sequence[Part], size: int, *key: int | str) -> list[tuple[int, slice]]:
    """The batches of all parts as (part, piece of its order); of several parts they are mixed."""
    pieces = [(i, cut) for i, part in enumerate(parts) for cut in cuts(len(part.samples), size)]
    if len(parts) > 1:
        pieces = [pieces[k] for k in order(len(pieces), *key, "parts").tolist()]
    return pieces


def epoch_batches(parts: Sequence[Part], size: int, *key: int | str) -> Iterator[Batch]:
    """Every sample once, in the order of a key; a batch is of one part."""
    devices = [part.samples.y.device for part in parts]
    orders = [o.to(d) for o, d in zip(orders_of(parts, *key), devices, strict=True)]
    for i, cut in pieces_of(parts, size, *key):
        part = parts[i]
        yield Batch(*part.samples.batch(orders[i][cut]), part.task, part.head)


def joined(parts: Sequence[Part]) -> Part:
    """Parts that share a head as one, so that a batch mixes them."""
    first = parts[0]
    x, y = (torch.cat([getattr(p.samples, key) for p in parts]) for key in ("x", "y"))
    return Part(first.task, first.head, Tensors(x, y, first.samples.normalisation))
