"""Products of every group's matrices, and sums with them, in few operations.

What is called in every step: it runs eagerly, under vmap and inside a CUDA graph.
"""

from typing import Any

import torch
from torch import Tensor

from ..fast import kernels
from .vmapped import is_batchedtensor, runs_first


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B of every group; of one alone as plain matrices, for which GPUs have better kernels."""
    if len(A) > 1:
        return A @ B
    if is_batchedtensor(A) or is_batchedtensor(B):
        stacked: Tensor = _StackedProduct.apply(A[0], B[0])  # type: ignore[no-untyped-call]
        return stacked.unsqueeze(0)
    return kernels.product(A[0], B[0]).unsqueeze(0)


def plus_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X + alpha A B."""
    if len(A) > 1:
        return torch.baddbmm(X, A, B, alpha=alpha)
    one = X[0], A[0], B[0]
    if is_batchedtensor(one[0]):
        stacked: Tensor = _StackedSum.apply(*one, alpha)  # type: ignore[no-untyped-call]
        return stacked.unsqueeze(0)
    return kernels.plus_product(*one, alpha).unsqueeze(0)


def into_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X + A B where X is not needed any more: it becomes the result, unless it is batched."""
    if is_batchedtensor(X):
        return plus_product(X, A, B, alpha)
    if len(A) > 1:
        return X.baddbmm_(A, B, alpha=alpha)
    kernels.add_product(X[0], A[0], B[0], alpha)
    return X


class _Stacked(torch.autograd.Function):
    """Products that vmap has no good rule for; called under vmap only, which skips `forward`."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch asks for it where there is a rule for vmap."""


class _StackedProduct(_Stacked):
    """Products of several runs, by the kernels of this package where they fit."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, A: Tensor, B: Tensor) -> Any:
        return kernels.products(*runs_first(info, in_dims, A, B)), 0


class _StackedSum(_Stacked):
    """A product that is added to something: vmap's own rule takes three kernels, not one."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor, A: Tensor, B: Tensor, alpha: float) -> Any:
        return torch.baddbmm(*runs_first(info, in_dims, X, A, B), alpha=alpha), 0
