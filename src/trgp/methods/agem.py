"""Averaged gradient episodic memory, A-GEM (Chaudhry et al., ICLR 2019).

Each task stores some examples. A gradient g that would raise the mean loss on a random batch of
them, g . g_ref < 0, is projected: g - (g . g_ref / g_ref . g_ref) g_ref.
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
class AGEM(Method):
    """Project gradients so that a step does not raise the mean loss on stored examples."""

    about: ClassVar[About] = About(
        family="replay",
        stores="examples of old tasks",
        paper="Chaudhry et al., ICLR 2019",
        task_id_at_test=False,
    )
    consumes: ClassVar[bool] = True

    memory_size: int = 1000
    """Number of stored examples over all tasks, split equally between them. With more tasks than
    examples, the first tasks store one each."""
    reference_size: int = 0
    """Number of stored examples drawn in every step, whose mean loss must not rise. 0: the batch
    size. The authors' code uses 256."""

    def __post_init__(self) -> None:
        check_count("memory_size", self.memory_size)
        if self.reference_size != 0:
            check_count("reference_size", self.reference_size)

    def stackable(self) -> bool:
        return False  # a step computes a gradient of its own

    def random_numbers(self, batch_size: int) -> int:
        return self.reference_size or batch_size

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        if "memory" in state:
            grads = projected(
                grads, self.reference(params, state, batch, sorted(self.network.trainable))
            )
        return super().step(params, grads, state, batch, lr)

    def reference(
        self, params: Params, state: State, batch: Batch, trained: list[str]
    ) -> dict[str, Tensor]:
        """The gradient of the mean loss on random examples."""
        assert batch.u is not None
        held = tensors(level(state, "memory"))
        filled = torch.full((), len(held["y"]), device=batch.y.device)
        u = batch.u[: self.reference_size or len(batch.y)]
        them = memory.unpacked(memory.picked(held, u, filled), state)
        # Gradients of old heads count too, although the batch's loss does not depend on them.
        with torch.enable_grad():
            free = {name: params[name].detach().requires_grad_() for name in trained}
            loss = memory.loss(self.network, {**params, **free}, them)
            found = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
        return {n: g for n, g in zip(trained, found, strict=True) if g is not None}

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Store some examples of the task."""
        state = memory.with_scale(ctx)
        held = tensors(level(state, "memory"))
        room = self.memory_size - (len(held["y"]) if held else 0)
        share = min(room, max(1, self.memory_size // ctx.tasks))
        new = memory.packed(memory.examples(ctx.samples(share, "memory")), state)
        return ctx.params, {**state, "memory": memory.joined(held, new) if held else new}


def projected(grads: Grads, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the component that opposes the reference; other gradients stay unchanged."""
    own = {name: torch.zeros_like(r) for name, r in reference.items()}
    own |= {name: g for name, g in grads.items() if isinstance(g, Tensor)}
    shared = sorted(reference)
    along = torch.stack([(own[n] * reference[n]).sum() for n in shared]).sum()
    length = torch.stack([reference[n].square().sum() for n in shared]).sum()
    excess = along.clamp(max=0) / length.clamp(min=torch.finfo(length.dtype).tiny)
    return own | {name: own[name] - excess * reference[name] for name in shared}
