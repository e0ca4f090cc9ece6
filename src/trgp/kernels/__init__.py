"""Kernels for what small networks spend their time in on a GPU, in Triton."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["add_product", "own_kernels", "product"]

SWITCH = "TRGP_KERNELS"  # an environment variable: 0 leaves everything to torch's kernels


def own_kernels(device: torch.device) -> AbstractContextManager[object]:
    """While this is open, a network on this device is computed by them where they fit."""
    if device.type != "cuda" or not _usable(device):
        return nullcontext()
    from .mode import OwnKernels  # which imports Triton

    return OwnKernels()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) b (K, N), by the kernel for few rows where it fits."""
    if a.is_cuda and _usable(a.device):
        from . import few_rows

        if few_rows.fits(a, b):
            found: torch.Tensor = few_rows.product(a, b)
            return found
    return a @ b


def add_product(
    W: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float
) -> torch.Tensor:
    """W + alpha left right, in the memory of W, by the kernel for few terms where it fits."""
    if W.is_cuda and _usable(W.device):
        from . import few_terms

        if few_terms.fits(W, left, right):
            few_terms.add_product(W, left, right, alpha)
            return W
    return W.addmm_(left, right, alpha=alpha)


@cache
def _usable(device: torch.device) -> bool:
    """Triton comes with torch on Linux, but needs a C compiler to begin with: it is tried once."""
    if os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return False
    try:
        from .max_pool import max_pool2d

        max_pool2d(torch.zeros(1, 1, 2, 2, device=device), (2, 2), (2, 2), (0, 0))
    except Exception as error:  # of a compiler or driver, in whatever words
        warnings.warn(
            f"Triton cannot be used here ({type(error).__name__}: {error}); networks are computed "
            f"by torch's kernels, which takes longer. Set {SWITCH}=0 to leave this out.",
            stacklevel=3,
        )
        return False
    return True
