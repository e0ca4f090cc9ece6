"""Shared parts of DEN and RCL: a network that gets more units, of which tasks use the oldest.

New units come after the old ones, so what a task computes with is the first units of every layer,
as many as there were when it had been learnt. Biases, norm layers and the head are a task's own.
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
"""Where in the state masks say which entries of a tensor may move; without a mask all may."""


@dataclass(frozen=True)
class Growing(Method):
    """A chain of layers to which a task can add units."""

    consumes: ClassVar[bool] = True
    moving: ClassVar[tuple[str, ...]] = (ADAM,)
    resizes: ClassVar[bool] = True

    name: ClassVar[str]

    decay: float = 1e-4
    """Weight of half the squares of the weights that may move."""

    def __post_init__(self) -> None:
        if self.decay != 0:
            check_number("decay", self.decay, above=0)

    @cached_property
    def chain(self) -> Chain:
        return chain_of(self.network, self.name)

    def check(self) -> None:
        chain_of(self.network, self.name)  # which refuses what is none

    def stackable(self) -> bool:
        """Every seed has widths of its own."""
        return False

    def widths(self, state: State) -> list[int]:
        """How wide the layers are between tasks."""
        every = tensors(level(state, "widths"))
        found: list[int] = every[str(len(every) - 1)].tolist() if every else [*self.chain.units]
        return found

    def phase(
        self, params: Params, state: State, task: int, free: Params, **more: Mapping[str, Tensor]
    ) -> State:
        """What is kept of old tasks, and what a phase of this one needs beside it.

        free: the masks of what may move. more: what else the phase reads, by its name in the state.
        """
        kept = {key: state[key] for key in ("network", "own", "widths") if key in state}
        used = {*self.chain.weights, *own_parts(self.network, task)} & self.network.trainable
        return {**kept, **more, FREE: dict(free), ADAM: moments(params, used)}

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """Adam on the loss and the squares, where entries are free."""
        free = tensors(level(state, FREE))
        along = {}
        for name, grad in grads.items():
            assert isinstance(grad, Tensor)
            pull = grad + self.decay * params[name] if grad.dim() > 1 else grad
            along[name] = pull * free[name] if name in free else pull
        return adam(params, along, state, lr)

    def recorded(self, ctx: Context, params: Params, widths: Widths) -> tuple[Params, State]:
        """The parameters to go on from and the state, when a task has been learnt at some widths.

        Heads of later tasks are drawn anew, to fit.
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
    """Tensors with more units, drawn by a key after the old ones, and masks of what is new."""
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
    """Some units of every layer as they were before the task, and copies of them after all others.

    Where both ends of a weight are of this task, it comes from the copy in place of the unit: in
    rows of copies, of units born in this task, and of the head.

    Args:
        before: the layers' weights when the task began, with the units there were.
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
            W[:born, widths[place - 1] :] = 0  # old units see split units alone
            W[born:, list(moved[place - 1])] = 0  # new ones their copies
        if old is not None:
            units, back = list(moved[place]), chain.opened(name, old, old_widths)
            W[units] = 0
            W[units, : back.shape[1]] = back[units]
        grown[name] = W.reshape(grown[name].shape)
    return grown


def block(shape: Iterable[int]) -> tuple[slice, ...]:
    """The first entries of a tensor, along every axis."""
    return tuple(slice(0, n) for n in shape)
