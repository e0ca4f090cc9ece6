"""Steps in place: whether a step may write its result into the tensors that it is given, and SGD.

Steps change nothing that they are given: they write into copies. Who needs the old values no more
can give their memory away, and spares a large network two passes over its weights a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..types import Rate
from .vmapped import is_batchedtensor

_DONATED = ContextVar("donated", default=False)


@contextmanager
def donated() -> Iterator[None]:
    """While this is open, what a step is given to change is given away."""
    token = _DONATED.set(True)
    try:
        yield
    finally:
        _DONATED.reset(token)


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, to be written into; of runs under vmap none is, and none copied."""
    return tensor if _DONATED.get() or is_batchedtensor(tensor) else tensor.clone()


def descend(params: list[Tensor], grads: list[Tensor], lr: Rate) -> None:
    """p - lr g of tensors of one dtype, all in one operation or two: of the many small ones that
    norm layers have, each would take as long by itself."""
    first = params[0]
    if first.is_cuda and first.dtype == torch.float32:
        fused_sgd(params, grads, lr)
        return
    rate = lr.to(first.dtype) if isinstance(lr, Tensor) else lr
    torch._foreach_sub_(params, torch._foreach_mul(grads, rate))


def fused_sgd(params: list[Tensor], grads: list[Tensor], lr: Rate) -> None:
    """p - lr g of float32 tensors, in one pass over their memory."""
    # In the same digits whether it is a number or lies on the device.
    digits = torch.as_tensor(lr).to(torch.float32)
    alike = [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for param, grad in zip(params, grads, strict=True)
    ]
    torch._fused_sgd_(
        params,
        alike,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=digits if isinstance(lr, Tensor) else digits.item(),
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
