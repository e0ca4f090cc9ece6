"""Notices where work reads numbers from tensors, past torch: what is recorded would repeat them."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = frozenset(
    {
        Tensor.numpy,
        Tensor.tolist,
        Tensor.item,
        Tensor.data_ptr,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__bool__,
    }
)


class LeavesTorchError(RuntimeError):
    """Some work depends on more than shapes."""


class LeavingTorch(TorchFunctionMode):
    """While this is open, reading a number from a tensor is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.left = False  # whether it was tried, also if the error was caught on its way

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            self.left = True
            raise LeavesTorchError(
                f"A step reads a number from a tensor by {func.__name__}; let it depend on shapes "
                "alone."
            )
        return func(*args, **(kwargs or {}))
