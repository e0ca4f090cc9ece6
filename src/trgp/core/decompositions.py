"""Decompositions of matrices, on a GPU always by the same stream.

Torch gives its products a work space for every stream. The library that it calls for decompositions
on a GPU, cuSOLVER, has one of its own, and bases came to other last digits on one stream, that of
the first run in a process, than on all others. Runs have streams of their own: their bits would go
by which they were given.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of symmetric matrices (..., n, n), ascending, and their vectors."""
    values, vectors = _by_one_stream(torch.linalg.eigh, A)
    return values, vectors


def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Q and R of matrices, like torch.linalg.qr."""
    Q, R = _by_one_stream(torch.linalg.qr, A, mode=mode)
    return Q, R


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, the singular values, descending, and V' of matrices (..., o, n)."""
    U, values, Vt = _by_one_stream(torch.linalg.svd, A, full_matrices=False)
    return U, values, Vt


def cholesky(A: Tensor) -> Tensor:
    """L with A = L L'."""
    L: Tensor = _by_one_stream(torch.linalg.cholesky, A)
    return L


def cholesky_solve(D: Tensor, L: Tensor) -> Tensor:
    """Y with L L' Y = D."""
    Y: Tensor = _by_one_stream(torch.cholesky_solve, D, L)
    return Y


def _by_one_stream(decompose: Callable[..., Any], *matrices: Tensor, **options: Any) -> Any:
    device = matrices[0].device
    if device.type != "cuda":
        return decompose(*matrices, **options)
    own, shared = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if own == shared:
        return decompose(*matrices, **options)
    shared.wait_stream(own)
    try:
        with torch.cuda.stream(shared):
            found = decompose(*matrices, **options)
    finally:  # also where it failed: until then the matrices may be read
        own.wait_stream(shared)
    for tensor in (found,) if isinstance(found, Tensor) else found:
        tensor.record_stream(own)  # else the other stream may give its memory away too early
    return found
