"""Gradient clipping by the joint norm, as in HAT's published code for all its methods."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..options import check_number
from ..types import Params, Rate, State
from .base import Batch, Grads, Method


@dataclass(frozen=True)
class Limited(Method):
    """Plain SGD with gradient clipping."""

    consumes: ClassVar[bool] = True

    gradient_limit: float = 0.0
    """Upper bound on the norm of the gradient over all parameters; a longer gradient is scaled down
    to it. 0: no limit."""

    def __post_init__(self) -> None:
        if self.gradient_limit != 0:
            check_number("gradient_limit", self.gradient_limit, above=0)

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        if self.gradient_limit:
            whole = {name: g for name, g in grads.items() if isinstance(g, Tensor)}
            grads = shortened(whole, self.gradient_limit)
        return super().step(params, grads, state, batch, lr)


def shortened(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Scale the gradients by one factor, so that their joint norm is at most the limit."""
    length = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    scale = (limit / length.clamp(min=1e-12)).clamp(max=1.0)
    return {name: g * scale for name, g in grads.items()}
