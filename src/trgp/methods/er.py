"""Experience replay from a reservoir, ER_Res (Chaudhry et al., 2019).

A memory of fixed size stores a uniform sample of the whole stream; every batch is learnt together
with an equal number of examples from it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..options import check_count
from ..tree import level, tensors
from ..types import Params, Rate, State
from . import memory
from .base import About, Batch, Context, Grads, Method


@dataclass(frozen=True)
class ER(Method):
    """Train on every batch together with an equal number of stored examples."""

    about: ClassVar[About] = About(
        family="replay",
        stores="examples of old tasks",
        paper="Chaudhry et al., 2019",
        task_id_at_test=False,
    )
    consumes: ClassVar[bool] = True
    moving: ClassVar[tuple[str, ...]] = ("memory", "seen")
    needs: ClassVar[tuple[str, ...]] = ("first",)

    memory_size: int = 1000
    """Number of stored examples over all tasks."""

    def __post_init__(self) -> None:
        check_count("memory_size", self.memory_size)

    def random_numbers(self, batch_size: int) -> int:
        return 2 * batch_size

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        state = memory.with_scale(ctx)
        if "memory" in state:
            return ctx.params, state
        one = memory.packed(memory.examples(ctx.samples(1, "shape")), state)
        kept = memory.empty(self.memory_size, one)
        return ctx.params, {**state, "memory": kept, "seen": torch.zeros_like(kept["y"][0])}

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        """Mean loss over the batch and as many examples; with an empty memory, the batch twice."""
        assert batch.u is not None
        new = memory.examples(batch)
        held, seen = tensors(level(state, "memory")), tensors(state)["seen"]
        u = batch.u[: len(batch.y)]
        replayed = memory.picked(held, u, seen.clamp(max=self.memory_size))
        replayed = memory.unpacked(replayed, state)
        replayed = {key: torch.where(seen > 0, replayed[key], new[key]) for key in new}
        return memory.loss(self.network, params, memory.joined(new, replayed))

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """Take a plain SGD step; in a task's first epoch, add its samples to the reservoir."""
        moved, _ = super().step(params, grads, state, batch, lr)
        if not batch.first:
            return moved, {}
        assert batch.u is not None
        kept, seen = memory.reservoir(
            tensors(level(state, "memory")),
            tensors(state)["seen"],
            memory.packed(memory.examples(batch), state),
            batch.u[len(batch.y) :],
        )
        return moved, {"memory": kept, "seen": seen}
