"""Two ways to compute with scaled weights: native, where it is exact, and literal."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import drifting, literal, native
from ..core.literal import effective_weight
from ..core.memory import Change, Memory
from ..types import Params
from .protected import Directions, Protected

Kept = dict[str, Tensor]
Parts = tuple[Tensor | None, Kept]
"""Parts of a layer during training: its extra trainable tensor, if any, and constants."""


class Form(ABC):
    """Additions to GPM for a layer with trusted tasks, in and after its training."""

    name: ClassVar[str]

    @abstractmethod
    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        """The layer's parts at the start of a task, at Q = I."""

    @abstractmethod
    def padded(self, each: Protected, M: Tensor, held: Kept, K: int) -> Kept:
        """Constants for vmapped runs, in the shapes of a layer with K trusted tasks."""

    def to_stack(
        self, each: Protected, params: Params, own: Tensor | None, held: Kept, K: int
    ) -> tuple[Params, Kept]:
        """Parameters that differ in vmapped runs, and extra tensors that move with them."""
        return {}, {}

    def from_stack(
        self, each: Protected, params: Params, moved: Kept, own: Tensor | None, held: Kept
    ) -> tuple[Params, Tensor | None]:
        """Inverse of `to_stack` after an epoch: the changed parameters and the new `own`."""
        return {}, None

    @abstractmethod
    def finish(
        self,
        own: Tensor | None,
        held: Kept,
        W: Tensor,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        """The scalings to store when the task ends with the parameter W."""

    @abstractmethod
    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        """W_eff of a finished task, from the current shared W (g, o, n)."""


@dataclass(frozen=True)
class NativeForm(Form):
    """The parameter is W_eff itself, and a step is that of `core.native`."""

    rate: float
    """Learning rate of Q, as a multiple of the network's learning rate."""
    name: ClassVar[str] = "native"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        K = len(trusted)
        sizes = (batch_size, K, *each.layer.shape, old.M.shape[2])
        form: native.Form = native.cheaper_form(*sizes) if each.factored else "gradient"
        task = native.begin(W, old.M, [old.masks[t] for t in trusted], form, self.rate)
        whole = each.factored and native.dense_pays(*sizes)
        return None, task._asdict() | (native.dense(task, K, self.rate)._asdict() if whole else {})

    def finish(
        self,
        own: Tensor | None,
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
        else:  # no trusted task
            task = native.begin(M.new_zeros(each.layer.shape), M, [], "gradient")
        return native.dense(task, K, self.rate)._asdict()


@dataclass(frozen=True)
class LiteralForm(Form):
    """W and every S_j = Q_j - I are parameters, and W_eff is made from them in every pass.

    The S_j lie on the diagonal of one matrix S over all bases side by side, B, since
    W B S B' = sum_j W B_j S_j B_j' takes as few operations as for one task. In vmapped runs the
    parameter is W_eff, and a step is that of `core.drifting`.
    """

    rate: float
    """Learning rate of Q, as a multiple of the network's learning rate."""
    orthogonal: bool = True
    """Whether W moves only orthogonally to M, so that W B is constant inside M."""
    name: ClassVar[str] = "literal"

    def begin(
        self, each: Protected, W: Tensor, old: Directions, trusted: Sequence[int], batch_size: int
    ) -> Parts:
        bases = [old.basis(t) for t in trusted]
        B = torch.cat(bases, 2)
        M = native.aligned(old.M)  # may have no columns next to an unprotected one
        # Store each basis' width as a shape: reading a number would wait for the device.
        ones = {f"ones{k}": W.new_ones(basis.shape[2]) for k, basis in enumerate(bases)}
        held = {"M": M, "C": W @ M, "B": B, **ones}
        if self.orthogonal and not each.bendable:
            ends = torch.tensor([len(one) for one in ones.values()], device=W.device).cumsum(0)
            # The last column of a basis is its unprotected one.
            places = ends[[t in old.loose for t in trusted]] - 1
            held |= {"CB": W @ B, "loose": B[..., places], "places": places}
        elif len(bases) > 1:
            held["diagonal"] = torch.block_diag(*(one.outer(one) for one in ones.values()))
        return W.new_zeros(len(W), B.shape[2], B.shape[2]), held

    def learning(self, W: Tensor, S: Tensor, held: Kept) -> Tensor:
        """W_eff of the task that is being learnt."""
        if "CB" not in held:
            return effective_weight(W, [held["B"]], [masked(S, held)])
        trusted = literal.Trusted(*(held[key] for key in ("B", "CB", "loose", "places")))
        return literal.scaled(W, S, trusted, _widths(held))

    def padded(self, each: Protected, M: Tensor, held: Kept, K: int) -> Kept:
        o = each.layer.shape[1]
        return drifting.fixed(M, o, *_bases(held), K, self.rate)._asdict()

    def to_stack(
        self, each: Protected, params: Params, own: Tensor | None, held: Kept, K: int
    ) -> tuple[Params, Kept]:
        bases, _ = _bases(held)
        W, moving = drifting.enter(each.pack(params), bases, _scalings(own, held), K)
        return each.unpack(W, params), moving._asdict()

    def from_stack(
        self, each: Protected, params: Params, moved: Kept, own: Tensor | None, held: Kept
    ) -> tuple[Params, Tensor | None]:
        moving, begun = drifting.Moving(**moved), _scalings(own, held)
        W, scalings = drifting.leave(moving, *_bases(held), begun, self.rate)
        alone = each.unpack(W, params)  # views, not contiguous
        new = {name: part.contiguous() for name, part in alone.items()}
        if own is None:
            return new, None
        S = torch.zeros_like(own)
        for part, learnt in zip(_scalings(S, held), scalings, strict=True):
            part.copy_(learnt)
        return new, S

    def finish(
        self,
        own: Tensor | None,
        held: Kept,
        W: Tensor,
        old: Directions,
        trusted: list[int],
    ) -> Kept:
        return {f"S{k}": S.clone() for k, S in enumerate(_scalings(own, held))}

    def effective(self, W: Tensor, kept: Kept, old: Directions, trusted: list[int]) -> Tensor:
        bases = [old.basis(t) for t in trusted]
        return effective_weight(W, bases, numbered(kept, "S"))


def masked(S: Tensor, held: Kept) -> Tensor:
    """Set S to 0 outside the diagonal blocks S_j, even if a step has moved it there."""
    return S * held["diagonal"] if "diagonal" in held else S


def numbered(named: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    """Tensors named `prefix` plus a number, by the number from 0, in any stored order."""
    return [
        named[f"{prefix}{k}"]
        for k in itertools.takewhile(lambda k: f"{prefix}{k}" in named, itertools.count())
    ]


def _bases(held: Kept) -> tuple[Sequence[Tensor], list[Tensor]]:
    """B_j of the trusted tasks, if any, and the constant parts of W B_j."""
    bases = held["B"].split(_widths(held), 2) if "B" in held else ()
    return bases, [drifting.constant(held["M"], held["C"], B) for B in bases]


def _scalings(S: Tensor | None, held: Kept) -> list[Tensor]:
    """The S_j, as views of S."""
    return [] if S is None else literal.on_diagonal(S, _widths(held))


def _widths(held: Kept) -> list[int]:
    return [len(one) for one in numbered(held, "ones")]


def _task(held: Kept) -> native.Task:
    return native.Task(*(held[key] for key in native.Task._fields))


def _memory(C: Tensor, old: Directions) -> Memory:
    return Memory(old.M, C, old.ranks, dict(old.masks.items()))
