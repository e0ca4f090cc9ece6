"""The two ways to compute with scaled weights: native, where it is exact, and literal."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from ..core import native
from ..core.scaling import effective_weight
from ..core.subspace import Memory
from ..task import Change
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
    def padded(
        self, each: Protected, M: Tensor, own: Sequence[Tensor], held: Kept, K: int
    ) -> Parts:
        """The same in the shapes of a layer that trusts K tasks, of which some may be empty."""

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

    def padded(
        self, each: Protected, M: Tensor, own: Sequence[Tensor], held: Kept, K: int
    ) -> Parts:
        if "signs" in held:
            task = _task(held)
        else:  # it trusts nobody
            g, o, n = each.layer.shape
            task = native.begin(M.new_zeros(g, o, n), M, [], "gradient")
        return [], native.dense(task, K, self.rate)._asdict()


class LiteralForm(Form):
    """W and every Q_j - I are parameters, and W_eff is made from them in every pass."""

    name = "literal"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        bases = [old.basis(t) for t in trusted]
        own = [W.new_zeros(len(W), B.shape[2], B.shape[2]) for B in bases]
        held = {"M": old.M, "C": W @ old.M}  # which may have no columns where there is a loose one
        return own, held | {f"B{k}": B for k, B in enumerate(bases)}

    def padded(
        self, each: Protected, M: Tensor, own: Sequence[Tensor], held: Kept, K: int
    ) -> Parts:
        """Every B_j and S_j (g, n, n): where B_j is zero S_j has no gradient, and stays zero.

        A basis can have n + 1 columns: all n, and a loose direction that is then zero, as long as
        there is one group, which linear layers have. That column is left out.
        """
        g, n, _ = M.shape
        missing = [M.new_zeros(g, n, n)] * (K - len(own))
        bases = [_square(B, n) for B in numbered(held, "B")] + missing
        scalings = [_square(S, n) for S in own] + missing
        return scalings, {f"B{k}": B for k, B in enumerate(bases)}

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


def _square(X: Tensor, n: int) -> Tensor:
    """(g, n, n), with zeros on the right and below."""
    return pad(X, (0, n - X.shape[2], 0, n - X.shape[1]))


def _task(held: Kept) -> native.Task:
    return native.Task(*(held[key] for key in native.Task._fields))


def _memory(C: Tensor, old: Directions) -> Memory:
    return Memory(old.M, C, old.ranks, dict(old.masks.items()))
