"""How far a tensor reaches: the kernels count places in 32 bits."""

from torch import Tensor

MOST = (1 << 31) - (1 << 16)  # numbers: a block's last place fits too


def reach(tensor: Tensor) -> int:
    """How far its last number lies from its first; it may be a part of a larger one."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
