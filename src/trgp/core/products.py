"""Products of every group's matrices, and sums with them, in few operations.

What is called in every step: it runs eagerly, under vmap and inside a CUDA graph.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels import add_product
from ..kernels import product as _of_matrices
from .vmapped import is_batchedtensor, runs_first


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B of every group; of one alone as plain matrices, for which GPUs have better kernels."""
    return _of_matrices(A[0], B[0]).unsqueeze(0) if len(A) == 1 else A @ B


def plus_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X + alpha A B."""
    if len(A) > 1:
        return torch.baddbmm(X, A, B, alpha=alpha)
    one = X[0], A[0], B[0]
    if is_batchedtensor(one[0]):
        stacked: Tensor = _StackedProduct.apply(*one, alpha)  # type: ignore[no-untyped-call]
        return stacked.unsqueeze(0)
    return torch.addmm(*one, alpha=alpha).unsqueeze(0)


def into_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """The same where X is not needed any more: it becomes the result, if it is no batched one."""
    if is_batchedtensor(X):
        return plus_product(X, A, B, alpha)
    if len(A) > 1:
        return X.baddbmm_(A, B, alpha=alpha)
    add_product(X[0], A[0], B[0], alpha)
    return X


class _StackedProduct(torch.autograd.Function):
    """The same of runs stacked by vmap, whose own rule takes three kernels for it, not one."""

    @staticmethod
    def forward(X: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
        raise NotImplementedError("Only called under vmap, which does not come here.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch asks for it where there is a rule for vmap."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor, A: Tensor, B: Tensor, alpha: float) -> Any:
        return torch.baddbmm(*runs_first(info, in_dims, X, A, B), alpha=alpha), 0
