"""Shared parts of DEN and RCL: a network that grows by units.

New units come after the old ones, so a task computes with the first units of every layer, up to
the width at the end of its training. Biases, norm layers and the head are per task.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..gates import HEADS
from ..options import check_number
from ..tree import level, put, tensors
from ..types import Params, Rate, State
from .adam import ADAM, adam, moments
from .base import Batch, Context, Grads, Method, Report
from .capacity import capacity
from .chain import Chain, Widths, chain_of
from .task_parts import own_parts

FREE = "free"
"""Key of the masks that mark the entries a step may change; without a mask it may change all."""


@dataclass(frozen=True)
class Growing(Method):
    """A chain of layers to which a task can add units."""

    consumes: ClassVar[bool] = True
    moving: ClassVar[tuple[str, ...]] = (ADAM,)
    resizes: ClassVar[bool] = True

    name: ClassVar[str]

    decay: float = 1e-4
    """Weight decay of the trainable weights: weight of half the sum of their squares."""

    def __post_init__(self) -> None:
        if self.decay != 0:
            check_number("decay", self.decay, above=0)

    @cached_property
    def chain(self) -> Chain:
        return chain_of(self.network, self.name)

    def check(self) -> None:
        chain_of(self.network, self.name)  # raises if the network is no chain

    def stackable(self) -> bool:
        """Return False: the widths differ between seeds."""
        return False

    def widths(self, state: State) -> list[int]:
        """Widths of the layers between tasks."""
        every = tensors(level(state, "widths"))
        found: list[int] = every[str(len(every) - 1)].tolist() if every else [*self.chain.units]
        return found

    def phase(
        self, params: Params, state: State, task: int, free: Params, **more: Mapping[str, Tensor]
    ) -> State:
        """State of a training phase: the parts kept from old tasks, and the inputs of the phase.

        free: masks of the entries that may change. more: other inputs of the phase, by their key.
        """
        kept = {key: state[key] for key in ("network", "own", "widths") if key in state}
        used = {*self.chain.weights, *own_parts(self.network, task)} & self.network.trainable
        return {**kept, **more, FREE: dict(free), ADAM: moments(params, used)}

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """Take an Adam step on the loss with weight decay, where entries are free."""
        free = tensors(level(state, FREE))
        along = {}
        for name, grad in grads.items():
            assert isinstance(grad, Tensor)
            pull = grad + self.decay * params[name] if grad.dim() > 1 else grad
            along[name] = pull * free[name] if name in free else pull
        return adam(params, along, state, lr)

    def recorded(self, ctx: Context, params: Params, widths: Widths) -> tuple[Params, State]:
        """Record a task learnt at these widths; return the next parameters and the state.

        Heads of later tasks are redrawn to fit the new widths.
        """
        task, names = ctx.task, own_parts(self.network, ctx.task)
        own = {name: params[name].clone() for name in names}
        kept = {key: ctx.state[key] for key in ("own", "widths") if key in ctx.state}
        state: State = {**kept, "network": {name: params[name] for name in self.chain.weights}}
        state = put(state, own, "own", str(task))
        state = put(state, torch.tensor(widths), "widths", str(task))
        heads = [n for n in self.chain.initial if n.startswith(f"{HEADS}.") and n not in names]
        return {**params, **self.chain.drawn(heads, widths, ctx.seed, "head", task)}, state

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        own = tensors(level(state, "own", str(task)))
        if not own:
            return params
        widths = tensors(level(state, "widths"))[str(task)].tolist()
        return {**own, **self.chain.part(tensors(level(state, "network")), widths)}

    def report(self, state: State) -> Report:
        figures = dict(capacity(self.network, state))
        units = dict(zip(self.chain.layers, self.widths(state), strict=True))
        return Report(figures=figures | {f"units of {n}": float(w) for n, w in units.items()})


def widened(
    chain: Chain, params: Params, widths: Widths, *key: int | str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Append units drawn by a key; return the tensors and masks of the new entries."""
    grown = chain.drawn(params, widths, *key)
    fresh = {}
    for name, tensor in params.items():
        old = block(tensor.shape)
        grown[name][old] = tensor
        fresh[name] = torch.ones_like(grown[name])
        fresh[name][old] = 0
    return grown, fresh


def with_copies(
    chain: Chain,
    params: Params,
    before: Params,
    moved: Sequence[Sequence[int]],
    weights: Sequence[str],
) -> dict[str, Tensor]:
    """Restore the units in `moved`, and append copies that keep their new weights.

    A weight between two units of this task comes from the copy in place of the unit: in rows of
    copies, of units added in this task, and of the head.

    Args:
        before: the layers' weights and units at the start of the task.
        moved: the units of every layer that are split.
        weights: the names of all weights that the task computes with, the head's last.
    """
    widths, old_widths = ([len(own[n]) for n in chain.weights] for own in (params, before))
    every = [[*range(n), *units] for n, units in zip(widths, moved, strict=True)]
    grown = chain.chosen(params, widths, every)
    wider = [len(units) for units in every]
    for name in weights:
        place, old = chain.places[name], before.get(name)
        W = chain.opened(name, grown[name], wider).clone()
        if place:
            born = 0 if old is None else len(old)
            W[:born, widths[place - 1] :] = 0  # old units see only the split units
            W[born:, list(moved[place - 1])] = 0  # new units see only the copies
        if old is not None:
            units, back = list(moved[place]), chain.opened(name, old, old_widths)
            W[units] = 0
            W[units, : back.shape[1]] = back[units]
        grown[name] = W.reshape(grown[name].shape)
    return grown


def block(shape: Iterable[int]) -> tuple[slice, ...]:
    """Index of the leading block of a tensor with this shape."""
    return tuple(slice(0, n) for n in shape)
