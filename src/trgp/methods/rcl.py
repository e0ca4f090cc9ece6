"""Reinforced Continual Learning, RCL (Xu and Zhu, NeurIPS 2018).

Before each task but the first, a controller tries numbers of units to add to each layer. A trial is
a child: the network with new units, whose weights, and those from new units into old ones, train
for a few epochs, while all old weights stay frozen. The reward is the validation accuracy minus a
price per new unit. The child with the best reward trains for the task's own epochs. Old tasks use
the units and weights from the end of their training, so that nothing is forgotten.

Differences from the published code, which is for perceptrons: choices are shares of a layer's
width; several trials are made between two steps of the controller; biases, like norm layers, are
per task instead of frozen; new weights have the spread of the network's initial ones.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..draws import seed_of
from ..gates import HEADS
from ..options import check_count, check_number
from ..types import Params, State
from .adam import ADAM
from .base import About, Child, Context
from .controller import Controller
from .growing import FREE, Growing, block, widened


@dataclass(frozen=True)
class RCL(Growing):
    """Choose the units that a task adds to each layer by trials of a controller."""

    about: ClassVar[About] = About(
        family="growing",
        stores="a network that grows, and a head per task",
        paper="Xu and Zhu, NeurIPS 2018",
        task_id_at_test=True,
        several_heads=True,
        holds_network=True,
    )
    consumes: ClassVar[bool] = True
    name: ClassVar[str] = "rcl"
    moving: ClassVar[tuple[str, ...]] = (ADAM, FREE)
    """Masks do not change, but children that share a captured step have different masks."""

    trials: int = 20
    """Number of children per task after the first (published: 50)."""
    per_round: int = 10
    """Number of trials between two steps of the controller."""
    trial_epochs: int = 5
    """Upper bound on the epochs of a trial (published: 15)."""
    choices: int = 30
    """Number of choices per layer, from 0 new units to the maximum."""
    growth: float = 0.05
    """Upper bound on the units that a task adds, as a share of the layer's initial units."""
    price: float = 1e-4
    """Price per new unit, subtracted from the reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("trials", "per_round", "trial_epochs", "choices"):
            check_count(name, getattr(self, name))
        check_number("growth", self.growth, above=0)
        if self.price != 0:
            check_number("price", self.price, above=0)

    @property
    def most(self) -> list[int]:
        """Upper bound on the units that a task adds to each layer."""
        return [max(1, round(self.growth * units)) for units in self.chain.units]

    def units(self, action: list[int]) -> list[int]:
        """Number of units that an action adds to each layer, from 0 to `most`."""
        highest = max(1, self.choices - 1)
        return [round(k / highest * n) for k, n in zip(action, self.most, strict=True)]

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        params, own = dict(ctx.params), f"{HEADS}.{ctx.task}."
        if ctx.task == 0:
            return params, self.phase(params, ctx.state, 0, {})
        others = {n: p for n, p in params.items() if n.startswith(HEADS) and not n.startswith(own)}
        start = {name: p for name, p in params.items() if name not in others}
        old = self.widths(ctx.state)
        widest = [n + k for n, k in zip(old, self.most, strict=True)]
        grown, fresh = widened(self.chain, start, widest, ctx.seed, "units", ctx.task)
        best, added = self.best_child(ctx, grown, fresh)
        widths = [n + k for n, k in zip(old, added, strict=True)]
        params = self.chain.part(best, widths)
        free = self.chain.part({name: fresh[name] for name in self.chain.weights}, widths)
        params |= self.chain.drawn(others, widths, ctx.seed, "head", ctx.task)
        return params, self.phase(params, ctx.state, ctx.task, free)

    def best_child(self, ctx: Context, grown: Params, fresh: Params) -> tuple[Params, list[int]]:
        """The trained child with the best reward, at full width, and its new units per layer."""
        seed = seed_of(ctx.seed, "controller", ctx.task)
        controller = Controller(len(self.most), self.choices, seed)
        best, highest = (grown, [0] * len(self.most)), -math.inf
        for start in range(0, self.trials, self.per_round):
            actions = controller.sample(min(self.per_round, self.trials - start))
            children = [self.child(ctx, grown, fresh, self.units(action)) for action in actions]
            tried = ctx.train_children(children, self.trial_epochs, f"trials {start}")
            rewards = [
                child.accuracy - self.price * sum(self.units(action))
                for child, action in zip(tried, actions, strict=True)
            ]
            controller.learn(actions, rewards)
            for child, reward, action in zip(tried, rewards, actions, strict=True):
                if reward > highest:
                    best, highest = (child.params, self.units(action)), reward
        return best

    def child(self, ctx: Context, grown: Params, fresh: Params, added: list[int]) -> Child:
        """A child at full width, whose unused new units are 0 and stay 0.

        All children of a task have the same shapes and share one captured step.
        """
        widths = [n + k for n, k in zip(self.widths(ctx.state), added, strict=True)]
        params, free = dict(grown), {}
        for name, tensor in grown.items():
            if tensor.dim() > 1:
                used = block(self.chain.shape(name, widths))
                params[name], free[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
                params[name][used] = tensor[used]
                free[name][used] = 1.0 if name.startswith(HEADS) else fresh[name][used]
        return Child(self, params, self.phase(params, ctx.state, ctx.task, free))

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        widths = [len(ctx.params[name]) for name in self.chain.weights]
        return self.recorded(ctx, ctx.params, widths)
