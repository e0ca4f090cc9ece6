"""Helpers of our own vmap rules: torch's would take many small kernels for one."""

from typing import Any

from torch import Tensor
from torch._C._functorch import is_batchedtensor

__all__ = ["is_batchedtensor", "runs_first"]


def runs_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """The tensors that a rule is given, each with the runs as its first axis."""
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=False)
    ]
