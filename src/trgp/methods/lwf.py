"""Learning without Forgetting, LwF (Li and Hoiem, ECCV 2016).

Before a task, the outputs of the old heads on the new samples become targets in addition to the
labels. A temperature softens them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..options import check_number
from ..tree import level, tensors
from ..types import Params, State
from .base import About, Batch, Context, evaluating
from .limited import Limited
from .loss import cross_entropy


@dataclass(frozen=True)
class LwF(Limited):
    """Keep the outputs of old heads on new samples."""

    about: ClassVar[About] = About(
        family="distillation",
        stores="the network before the task",
        paper="Li and Hoiem, ECCV 2016",
        task_id_at_test=False,
    )

    strength: float = 2.0
    """Weight lambda of the old heads' loss. 0 is fine-tuning."""
    temperature: float = 2.0
    """Divisor of the logits before the softmax."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength != 0:
            check_number("strength", self.strength, above=0)
        check_number("temperature", self.temperature, above=0)

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        if ctx.task == 0 or not self.strength:
            return ctx.params, ctx.state
        return ctx.params, {"teacher": dict(ctx.params)}

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        teacher = tensors(level(state, "teacher"))
        if not teacher:
            return super().loss(params, state, batch)
        # A head that all tasks share is the only old head.
        old = batch.task if self.network.separate_heads else 1
        targets = self.targets(teacher, batch, old)
        logits = self.network.every_head(params, batch.x)
        soft = F.log_softmax(logits[:old] / self.temperature, 2)
        distance = -(targets * soft).sum(2).mean(1).sum()
        return cross_entropy(logits[batch.head], batch.y) + self.strength * distance

    @torch.no_grad()
    def targets(self, teacher: Params, batch: Batch, old: int) -> Tensor:
        """Outputs of the old heads of the network before the task, without dropout."""
        with evaluating(self.network.module):
            logits = self.network.every_head(teacher, batch.x)
        return F.softmax(logits[:old] / self.temperature, 2)
