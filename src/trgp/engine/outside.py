"""Detection of numbers read from tensors, which a recording would repeat unchanged."""

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
    """The work depends on more than shapes."""


class LeavingTorch(TorchFunctionMode):
    """Raise an error at every read of a number from a tensor, while open."""

    def __init__(self) -> None:
        super().__init__()
        self.left = False  # whether a read was tried, even if its error was caught

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
