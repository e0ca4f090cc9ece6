"""Kernels for what small networks spend their time in on a GPU, in Triton."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["own_kernels"]


def own_kernels(device: torch.device) -> AbstractContextManager[object]:
    """While this is open, a network on this device is computed by them where they fit."""
    if device.type != "cuda" or not _there():
        return nullcontext()
    from .mode import OwnKernels  # which imports Triton

    return OwnKernels()


@cache
def _there() -> bool:
    """Triton comes with torch on Linux; elsewhere torch's own kernels do."""
    return find_spec("triton") is not None
