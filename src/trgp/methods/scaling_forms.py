"""The two ways to compute with scaled weights: native, where it is exact, and literal."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..core import native
from ..core.scaling import effective_weight
from ..core.subspace import Memory
from ..task import Change
from .protected import Directions, Protected

Kept = dict[str, Tensor]


class Form(ABC):
    """What a layer with a trust region adds to GPM while a task is learnt and afterwards."""

    name: str

    @abstractmethod
    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> tuple[list[Tensor], Kept, Kept]:
        """At Q = I: trainable tensors of its own, constants, and what a step changes."""

    @abstractmethod
    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        Tsum: Tensor | None,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        """What is kept of the scalings when the task ends."""

    @abstractmethod
    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        """W_eff of a finished task, from the shared W (g, o, n) of now."""


class NativeForm(Form):
    """The parameter is W_eff itself, and a step is that of `core.native`."""

    name = "native"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> tuple[list[Tensor], Kept, Kept]:
        m = old.M.shape[2]
        shape = (*each.layer.shape, m)
        cheaper = native.cheaper_form(batch_size, len(trusted), *shape)
        form: native.Form = cheaper if each.factored else "gradient"
        task, start = native.begin(W, old.M, [old.masks[t] for t in trusted], form)
        return [], {"signs": task.signs, "gain": task.gain}, {"Tsum": start.Tsum}

    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        Tsum: Tensor | None,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        assert Tsum is not None
        scalings = native.scalings(native.Task(**held), Tsum)
        change = Change.of(list(trusted), scalings, _memory(held["C"], old))
        kind = "S" if change.shift is None else "D"
        return {f"{kind}{k}": tensor for k, tensor in enumerate(change.tensors)}

    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        change = Change(list(trusted), numbered(kept, "S"), kept.get("D0"))
        return W + change.coordinates(_memory(W @ old.M, old)) @ old.M.mT

    def padded(
        self, each: Protected, M: Tensor, held: Kept, Tsum: Tensor | None, K: int
    ) -> tuple[native.Task, Tensor]:
        """What a layer holds during a task, in the shapes of one that trusts K tasks."""
        if Tsum is None:  # it trusts nobody
            g, o, _ = each.layer.shape
            W = M.new_zeros(g, o, M.shape[1])
            task, begun = native.begin(W, M, [], "gradient")
            Tsum = begun.Tsum
        else:
            task = native.Task(**held)
        return native.padded(task, Tsum, K, "factored" if each.factored else "gradient")


class LiteralForm(Form):
    """W and every Q_j - I are parameters, and W_eff is made from them in every pass."""

    name = "literal"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> tuple[list[Tensor], Kept, Kept]:
        bases = [old.basis(t) for t in trusted]
        own = [W.new_zeros(len(W), B.shape[2], B.shape[2]) for B in bases]
        return own, {f"B{k}": B for k, B in enumerate(bases)}, {}

    def finish(
        self,
        own: Sequence[Tensor],
        held: Kept,
        Tsum: Tensor | None,
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


def _memory(C: Tensor, old: Directions) -> Memory:
    return Memory(old.M, C, old.ranks, dict(old.masks.items()))
