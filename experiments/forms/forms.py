"""Prototype of a learner without Q: the model's own parameter is the effective weight.

    before the optimizer's step:  T = G M          G     <- G + (P(T) - T) M'
    after it:                     D = W_eff M - K  W_eff <- W_eff - (D - E) M'  K <- K + E

K are the present coordinates of W_eff in span(M), and E = Pi(D). Pi, the reach, is an orthogonal
projection; P is Pi too, but in the paper's form the gain of one step on every Q_j.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from trgp.core.gradient import LossFn
from trgp.core.guard import Guard, Pin
from trgp.core.scaling import unscale
from trgp.task import Change

from trgp import TRGP
from trgp.core.layers import Layer
from trgp.core.subspace import Memory, TaskId, columns_of

FORMS = ("paper", "range", "union", "full")


@dataclass(frozen=True)
class Reach:
    """A linear map of coordinates (1, o, m): D -> L (mask * L'D), or mask * D where L is None."""

    left: Tensor | None  # L (o, r)
    mask: Tensor  # which columns every direction in L serves (r, m), or which are served (m,)

    def __call__(self, D: Tensor) -> Tensor:
        if self.left is None:
            return D * self.mask
        E: Tensor = self.left @ ((self.left.mT @ D) * self.mask)
        return E

    def size(self, outputs: int) -> int:
        """How many numbers K - C takes: its columns, or where that is less, L'(K - C) by part."""
        if self.left is None:
            return outputs * int(self.mask.sum())
        return min(outputs * int(self.mask.any(0).sum()), int(self.mask.sum()))


def _trusted_columns(memory: Memory, trusted: Sequence[TaskId]) -> Tensor:
    """Which columns of M every trusted task's basis uses (J, m)."""
    m = memory.M.shape[2]
    masks = [memory.masks[j][0] for j in trusted]
    return torch.stack([F.pad(mask, (0, m - len(mask))) for mask in masks])


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> Reach:
    """A reach of several parts: directions L (o, r) and the columns (m,) that they serve."""
    lefts, masks = zip(*parts, strict=True)
    rows = [mask.expand(left.shape[1], -1) for left, mask in zip(lefts, masks, strict=True)]
    left = torch.cat(lefts, 1)
    return Reach(left, torch.cat(rows).to(left.dtype))


def _range(C: Tensor) -> Tensor:
    """An orthonormal basis of C's range, to the rounding of its own dtype."""
    U, S, _ = torch.linalg.svd(C.double().cpu(), full_matrices=False)
    weakest = max(C.shape) * torch.finfo(C.dtype).eps * float(S[0])
    L: Tensor = U[:, weakest < S].to(C)
    return L


def reach_of(memory: Memory, trusted: Sequence[TaskId], form: str) -> Reach:
    """Pi of a layer, where the trusted tasks' frozen coordinates are C_j."""
    C, held = memory.C[0], _trusted_columns(memory, trusted)
    if form == "full":
        return Reach(None, held.any(0).to(C.dtype))
    if form == "union":
        return _joined([(_range(C[:, held.any(0)]), held.any(0))])
    parts = []
    for pattern in held.mT.unique(dim=0):
        if pattern.any():
            group = (held.mT == pattern).all(1)
            parts.append((_range(C[:, held[pattern].any(0)]), group))
    return _joined(parts)


def gain_of(memory: Memory, trusted: Sequence[TaskId], scale_rate: float) -> Reach:
    """The paper's P: scale_rate times the sum of C_j C_j' over the trusted tasks j."""
    held = _trusted_columns(memory, trusted)
    return _joined((scale_rate**0.5 * memory.C[0][:, mask], mask) for mask in held)


class EffectivePin(Pin):
    """One layer's effective weight, and what may move in its part inside span(M)."""

    def __init__(
        self, layer: Layer, memory: Memory, reach: Reach | None, shown: Reach | None, decay: float
    ) -> None:
        """decay: what decoupled weight decay takes of a weight in one step, lr * weight_decay."""
        super().__init__(layer.params, layer.groups, memory.M, memory.C)
        self.K = memory.C.clone()
        self.reach, self.shown = reach, shown
        # The optimizer shrinks all of K, but only K - C decays: what is trusted gets C's part back.
        self.returned = decay * reach(memory.C) if reach is not None and decay else None

    def remember(self) -> None:
        """Nothing: K says what the update is measured from."""

    def project(self, grads: Sequence[Tensor]) -> None:
        """Replace the gradients' part inside span(M) by what the optimizer is shown of it."""
        T = self._inner(grads, self.M)
        self._add(grads, T if self.shown is None else T - self.shown(T), self.M, -1)

    def restore(self) -> None:
        """Take the update's part inside span(M) back but for what lies within reach."""
        D = self._inner(self.params, self.M) - self.K
        if self.reach is not None:
            E = self.reach(D)
            if self.returned is not None:
                E += self.returned
            self.K += E
            D -= E
        self._add(self.params, D, self.M, -1)


class EffectiveGuard(Guard):
    """Filters the gradients of every optimizer, SGD's among them."""

    @torch.no_grad()
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        filtered = super()._before_step(optimizer, args, kwargs)
        if type(optimizer) is torch.optim.SGD:
            self._project_gradients()
        return filtered


class EffectiveTRGP(TRGP):
    """TRGP whose tasks move the effective weight itself, within the reach of a form."""

    def __init__(
        self,
        model: nn.Module,
        *,
        form: str,
        scale_rate: float = 1.0,
        decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.form, self.scale_rate, self.decay = form, scale_rate, decay
        self._guard = EffectiveGuard()
        self._pins: dict[str, EffectivePin] = {}
        self._sizes: dict[TaskId, int] = {}

    def begin_task(self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn) -> None:
        super().begin_task(task, loader, loss_fn)
        opened = self._require_open()
        opened.scalings.clear()
        self._pins = {}
        for name, layer in self._plan.layers.items():
            unscale(layer)
            memory, trusted = self._memory[name], opened.selected[name]
            if memory.M.shape[2]:
                reach = reach_of(memory, trusted, self.form) if trusted else None
                shown = reach
                if trusted and self.form == "paper":
                    shown = gain_of(memory, trusted, self.scale_rate)
                self._pins[name] = EffectivePin(layer, memory, reach, shown, self.decay)
        self._guard.pins = list(self._pins.values())

    def end_task(self, loader: Iterable[Any]) -> None:
        """Finish the task as the learner does, for which K passes as the frozen part."""
        opened, before = self._require_open(), dict(self._memory)
        for name, pin in self._pins.items():
            self._memory[name] = replace(before[name], C=pin.K)
        super().end_task(loader)
        record = self._tasks[opened.task]
        numbers = 0
        for name, pin in self._pins.items():
            memory, C = self._memory[name], before[name].C
            frozen = torch.cat([C, memory.C[:, :, C.shape[2] :]], 2)
            memory = self._memory[name] = replace(memory, C=frozen)
            if pin.reach is not None:
                trusted = opened.selected[name]
                union = _trusted_columns(before[name], trusted).any(0, keepdim=True)
                shift = columns_of(pin.K - C, union)
                record.changes[name] = Change(trusted, [], shift)
                numbers += pin.reach.size(C.shape[1]) * shift.element_size()
        self._sizes[opened.task] = numbers

    @property
    def task_bytes(self) -> Mapping[TaskId, int]:  # type: ignore[override]
        """What each task would hold in the smallest of the ways to write K - C."""
        return self._sizes
