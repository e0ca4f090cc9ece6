"""Batches as users have them: tensors in tuples, lists or dicts, from anything that iterates."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the length of the first tensor in it."""
    first = next(tensors_in(batch), None)
    if first is None:
        raise TypeError(
            f"A batch of type {type(batch).__name__} holds no tensor; yield tensors, or tuples, "
            "lists or dicts of them."
        )
    return len(first) if first.dim() else 1


def first_samples(loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """Batches until `limit` samples have been seen (None: all), the last one cut to fit."""
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"The loader is a {type(loader).__name__}, which yields no batches; pass a list of "
            "batches or a DataLoader."
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            "The loader is an iterator that can be read only once, so reading it here would take "
            "its samples from training; pass a list of batches or a DataLoader."
        )
    seen = 0
    for batch in loader:
        size = samples_in(batch)
        if limit is not None and seen + size > limit:
            batch = _cut(batch, size, limit - seen)
        seen += size
        yield batch
        if limit is not None and seen >= limit:
            break
    if seen == 0:
        raise ValueError("The loader yields no samples; pass one that yields at least one batch.")


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from tensors_in(value)


def _cut(batch: Any, size: int, keep: int) -> Any:
    """The first `keep` samples: of every tensor in the batch that has one entry a sample."""
    if isinstance(batch, Tensor):
        return batch[:keep] if batch.dim() and len(batch) == size else batch
    if isinstance(batch, Mapping):
        parts = {key: _cut(value, size, keep) for key, value in batch.items()}
        if isinstance(batch, MutableMapping):  # of a class that loss_fn may rely on
            kept = copy(batch)
            kept.update(parts)
            return kept
        return parts
    if isinstance(batch, tuple | list):
        values = [_cut(value, size, keep) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
