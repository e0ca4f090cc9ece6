"""Triton kernels for the operations in which small networks spend their time on a GPU."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

__all__ = ["add_product", "own_kernels", "plus_product", "product", "products"]

SWITCH = "TRGP_KERNELS"  # environment variable: 0 selects torch's kernels throughout


def own_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Compute networks on this device with these kernels, where they fit, while open."""
    if device.type != "cuda" or not _usable(device):
        return nullcontext()
    from .mode import OwnKernels  # imports Triton

    return OwnKernels()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) b (K, N), by the kernel for few rows where it fits."""
    own = _few_rows(a, b)
    return own.product(a, b) if own else a @ b


def plus_product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """x + alpha a b, by the kernel for few rows where it fits."""
    own = _few_rows(a, b)
    if own:
        return torch.add(x, own.product(a, b), alpha=alpha)
    return torch.addmm(x, a, b, alpha=alpha)


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (R, M, K) b (R, K, N), by the kernel for few rows where it fits."""
    own = _few_rows(a, b)
    return own.products(a, b) if own else torch.bmm(a, b)


def _few_rows(a: torch.Tensor, b: torch.Tensor) -> ModuleType | None:
    """Return the kernel for few rows, if it is usable and fits."""
    if not a.is_cuda or not _usable(a.device):
        return None
    from . import few_rows

    return few_rows if few_rows.fits(a, b) else None


def add_product(
    W: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float
) -> torch.Tensor:
    """W + alpha left right, in place, by the kernel for few terms where it fits."""
    if W.is_cuda and _usable(W.device):
        from . import few_terms

        if few_terms.fits(W, left, right):
            few_terms.add_product(W, left, right, alpha)
            return W
    return W.addmm_(left, right, alpha=alpha)


@cache
def _usable(device: torch.device) -> bool:
    """Try Triton once: it comes with torch on Linux, but needs a C compiler to start."""
    if os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return False
    try:
        from .max_pool import max_pool2d

        max_pool2d(torch.zeros(1, 1, 2, 2, device=device), (2, 2), (2, 2), (0, 0))
    except Exception as error:  # a compiler or driver may raise anything
        warnings.warn(
            f"Triton cannot be used here ({type(error).__name__}: {error}), so networks run on "
            f"torch's kernels, which are slower; set {SWITCH}=0 to silence this.",
            stacklevel=3,
        )
        return False
    return True
