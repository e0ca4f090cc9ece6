"""EWC as HAT's code has it: with a limit on the gradient, which lets springs be strong."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trgp.methods.base import Batch, Grads
from trgp.methods.ewc import EWC
from trgp.types import Params, Rate, State


@dataclass(frozen=True)
class LimitedEWC(EWC):
    """EWC whose gradient, over all parameters, is shortened where it is longer than a limit."""

    limit: float = 100.0
    """The longest that it may be."""

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        whole = {name: g for name, g in grads.items() if isinstance(g, Tensor)}
        length = torch.stack(torch._foreach_norm(list(whole.values()))).norm()
        share = (self.limit / length.clamp_min(self.limit)).to(length.dtype)
        return super().step(params, {n: share * g for n, g in whole.items()}, state, batch, lr)
