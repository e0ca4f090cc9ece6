"""The two ways to compute with scaled weights: native, where it is exact, and literal."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import drifting, native
from ..core.scaling import effective_weight
from ..core.subspace import Memory
from ..task import Change
from .base import Params
from .protected import Directions, Protected

Kept = dict[str, Tensor]
Parts = tuple[list[Tensor], Kept]
"""Of a layer that learns: trainable tensors of its own, and constants."""


class Form(ABC):
    """What a layer with a trust region adds to GPM while a task is learnt and afterwards."""

    name: ClassVar[str]

    @abstractmethod
    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        """What it learns with, at Q = I."""

    @abstractmethod
    def padded(self, each: Protected, M: Tensor, held: Kept, K: int) -> Kept:
        """The constants of a stack, in the shapes of a layer that trusts K tasks."""

    def to_stack(
        self, each: Protected, params: Params, own: Sequence[Tensor], held: Kept, K: int
    ) -> tuple[Params, Kept]:
        """What of the network's parameters is another in a stack, and what moves beside them."""
        return {}, {}

    def from_stack(
        self, each: Protected, params: Params, moved: Kept, own: Sequence[Tensor], held: Kept
    ) -> tuple[Params, list[Tensor]]:
        """What it is alone when that has moved, and the tensors of its own, which were `own`."""
        return {}, []

    @abstractmethod
    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        W: Tensor,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        """What is kept of the scalings when the task ends with the parameter W."""

    @abstractmethod
    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        """W_eff of a finished task, from the shared W (g, o, n) of now."""


@dataclass(frozen=True)
class NativeForm(Form):
    """The parameter is W_eff itself, and a step is that of `core.native`."""

    rate: float
    """That of Q, in multiples of the network's."""
    name: ClassVar[str] = "native"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        K = len(trusted)
        sizes = (batch_size, K, *each.layer.shape, old.M.shape[2])
        form: native.Form = native.cheaper_form(*sizes) if each.factored else "gradient"
        task = native.begin(W, old.M, [old.masks[t] for t in trusted], form, self.rate)
        whole = each.factored and native.dense_pays(*sizes)
        return [], task._asdict() | (native.dense(task, K, self.rate)._asdict() if whole else {})

    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        W: Tensor,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        task = _task(held)
        memory = _memory(task.C, old)
        change = Change.of_shift(list(trusted), native.shift(task, W), memory)
        if change is None:
            change = Change(list(trusted), native.scalings(task, W))
        kind = "S" if change.shift is None else "D"
        return {f"{kind}{k}": tensor for k, tensor in enumerate(change.tensors)}

    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        change = Change(list(trusted), numbered(kept, "S"), kept.get("D0"))
        return W + change.coordinates(_memory(W @ old.M, old)) @ old.M.mT

    def padded(self, each: Protected, M: Tensor, held: Kept, K: int) -> Kept:
        if "signs" in held:
            task = _task(held)
        else:  # it trusts nobody
            task = native.begin(M.new_zeros(each.layer.shape), M, [], "gradient")
        return native.dense(task, K, self.rate)._asdict()


@dataclass(frozen=True)
class LiteralForm(Form):
    """W and every Q_j - I are parameters, and W_eff is made from them in every pass.

    In a stack the parameter is W_eff, and a step is that of `core.drifting`.
    """

    rate: float
    """That of Q, in multiples of the network's."""
    name: ClassVar[str] = "literal"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        bases = [old.basis(t) for t in trusted]
        own = [W.new_zeros(len(W), B.shape[2], B.shape[2]) for B in bases]
        M = native.aligned(old.M)
        held = {"M": M, "C": W @ M}  # which may have no columns where there is a loose one
        return own, held | {f"B{k}": B for k, B in enumerate(bases)}

    def padded(self, each: Protected, M: Tensor, held: Kept, K: int) -> Kept:
        o = each.layer.shape[1]
        return drifting.fixed(M, o, *_bases(held), K, self.rate)._asdict()

    def to_stack(
        self, each: Protected, params: Params, own: Sequence[Tensor], held: Kept, K: int
    ) -> tuple[Params, Kept]:
        W, moving = drifting.enter(each.pack(params), numbered(held, "B"), own, K)
        return each.unpack(W, params), moving._asdict()

    def from_stack(
        self, each: Protected, params: Params, moved: Kept, own: Sequence[Tensor], held: Kept
    ) -> tuple[Params, list[Tensor]]:
        moving = drifting.Moving(**moved)
        W, scalings = drifting.leave(moving, *_bases(held), own, self.rate)
        alone = each.unpack(W, params)  # parts of what lies side by side
        return {name: part.contiguous() for name, part in alone.items()}, scalings

    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        W: Tensor,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        return {f"S{k}": S for k, S in enumerate(own)}

    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        bases = [old.basis(t) for t in trusted]
        return effective_weight(W, bases, numbered(kept, "S"))


def numbered(named: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    """What is named `prefix` and a number, from 0 on, whatever order it lies in."""
    return [
        named[f"{prefix}{k}"]
        for k in itertools.takewhile(lambda k: f"{prefix}{k}" in named, itertools.count())
    ]


def _bases(held: Kept) -> tuple[list[Tensor], list[Tensor]]:
    """B_j of the trusted tasks, and what of W B_j is constant."""
    bases = numbered(held, "B")
    return bases, [drifting.constant(held["M"], held["C"], B) for B in bases]


def _task(held: Kept) -> native.Task:
    return native.Task(*(held[key] for key in native.Task._fields))


def _memory(C: Tensor, old: Directions) -> Memory:
    return Memory(old.M, C, old.ranks, dict(old.masks.items()))
