"""Whether a step may write its result into the tensors that it is given.

Steps change nothing that they are given: they write into copies. Who needs the old values no more
can give their memory away, and spares a large network two passes over its weights a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from .vmapped import is_batchedtensor

_DONATED = ContextVar("donated", default=False)


@contextmanager
def donated() -> Iterator[None]:
    """While this is open, what a step is given to change is given away."""
    token = _DONATED.set(True)
    try:
        yield
    finally:
        _DONATED.reset(token)


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, to be written into; of runs under vmap none is, and none copied."""
    return tensor if _DONATED.get() or is_batchedtensor(tensor) else tensor.clone()
