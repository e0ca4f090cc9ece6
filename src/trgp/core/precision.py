"""Projections in full precision, whatever the network itself is run in."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


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
