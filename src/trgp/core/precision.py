"""Projections in full precision, whatever the network is run in and the device can do."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


NO_FLOAT64 = ("mps",)  # kinds of devices


def home_of_float64(device: torch.device) -> torch.device:
    """Where float64 is computed for tensors of a device: there, or on the CPU if it has none."""
    return torch.device("cpu") if device.type in NO_FLOAT64 else device


def doubled(tensor: Tensor) -> Tensor:
    """A tensor in float64, on the CPU if its device has none."""
    return tensor.to(home_of_float64(tensor.device), torch.float64)


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Leave autocast inside this function: a rounded projection is a leak into old tasks."""

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not devices:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in devices:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return outside
