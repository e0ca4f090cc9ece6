"""Bound on the extent of a tensor in memory: the kernels index in 32 bits."""

from torch import Tensor

MOST = (1 << 31) - (1 << 16)  # numbers, with room for a block's last place


def reach(tensor: Tensor) -> int:
    """Return the distance from the first to the last number; the tensor may be a view."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
