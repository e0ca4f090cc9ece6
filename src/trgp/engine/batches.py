"""Batches of an epoch, gathered by index."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..benchmarks.data import Tensors
from ..draws import order
from ..methods.base import Batch

FETCHED = 1 << 21  # upper bound on numbers gathered at once; a single batch may exceed it


class Part(NamedTuple):
    """Samples that are trained together, as one task."""

    task: int
    head: int
    samples: Tensors


class Cut(NamedTuple):
    """A batch: the index of its part and its number of samples."""

    part: int
    length: int


class Fetched(NamedTuple):
    """Consecutive batches of one part, gathered together."""

    part: Part
    lengths: list[int]
    x: Tensor
    y: Tensor


def cuts(n: int, size: int) -> list[slice]:
    """Cut 0 to n into slices of a size; a last slice of one sample is merged into the one before.

    BatchNorm has no statistics of a single sample. With size 1 nothing is merged.
    """
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1 < size:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]


@lru_cache(maxsize=64)
def _pieces(counts: tuple[int, ...], size: int) -> tuple[tuple[Cut, ...], Tensor]:
    """Return the batches of parts with these counts, and the start of each among all samples."""
    before = accumulate(counts, initial=0)
    found = [
        (Cut(i, cut.stop - cut.start), start + cut.start)
        for i, (count, start) in enumerate(zip(counts, before, strict=False))
        for cut in cuts(count, size)
    ]
    return tuple(cut for cut, _ in found), torch.tensor([start for _, start in found])


def rows_of(parts: Sequence[Part], size: int, *key: int | str) -> tuple[tuple[Cut, ...], Tensor]:
    """Draw an order of all samples from a key: the batches, and a row of indices for each.

    A batch has samples of one part; batches of several parts are shuffled. A row is as long as the
    longest batch, and its first `length` entries count.
    """
    counts = tuple(len(part.samples) for part in parts)
    found, starts = _pieces(counts, size)
    if len(parts) > 1:
        mixed = order(len(found), *key, "parts").tolist()
        found, starts = tuple(found[k] for k in mixed), starts[mixed]
    flat = torch.cat([order(count, *key, i) for i, count in enumerate(counts)])
    places = starts[:, None] + torch.arange(max(cut.length for cut in found))
    return found, flat[places.clamp(max=len(flat) - 1)]


def epoch_batches(parts: Sequence[Part], size: int, *key: int | str) -> Iterator[Batch]:
    """Yield every sample of the parts once, in batches; the key decides the order."""
    for part, lengths, x, y in fetched(parts, size, *key):
        for own_x, own_y in zip(x.split(lengths), y.split(lengths), strict=True):
            yield Batch(own_x, own_y, part.task, part.head)


def fetched(parts: Sequence[Part], size: int, *key: int | str) -> Iterator[Fetched]:
    """Yield the batches of `epoch_batches`, several batches of one part at a time.

    Gathering a single batch takes a GPU less time than Python takes to request it.
    """
    found, rows = rows_of(parts, size, *key)
    device = parts[0].samples.y.device
    if device.type == "cuda":  # an unpinned copy would wait for all queued work
        rows = rows.pin_memory().to(device, non_blocking=True)
    numbers = rows.shape[1] * parts[0].samples.x.shape[1:].numel()
    many = max(1, FETCHED // max(1, numbers)) if len(parts) == 1 else 1
    for start in range(0, len(rows), many):
        some = found[start : start + many]
        part, lengths = parts[some[0].part], [cut.length for cut in some]
        each = zip(rows[start : start + many].unbind(), lengths, strict=True)
        x, y = part.samples.batch(torch.cat([row[:length] for row, length in each]))
        yield Fetched(part, lengths, x, y)


def joined(parts: Sequence[Part]) -> Part:
    """Merge parts that share a head, so that a batch mixes them."""
    first = parts[0]
    x, y = (torch.cat([getattr(p.samples, key) for p in parts]) for key in ("x", "y"))
    return Part(first.task, first.head, Tensors(x, y, first.samples.normalisation))
