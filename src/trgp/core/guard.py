"""Keeps any optimizer's update out of the protected space.

The shared weight's coordinates in span(M) are known constants, C = W M. Whatever an optimizer does
(momentum, weight decay, element-wise rescaling), writing them back after its step,
W <- W + (C - W M) M', removes exactly the part of the update that lies in span(M), and rounding
cannot add up over steps. Once M fills more than half of the space its complement N is narrower, and
the same update is cheaper as W <- W_before + (W - W_before) N N'; there rounding could add up, so
that every tenth step is done the first way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .layers import Layer
from .precision import full_precision
from .subspace import Memory, complement


@full_precision
def with_coordinates(W: Tensor, M: Tensor, K: Tensor) -> Tensor:
    """W (g, o, n) with its part inside span(M) replaced by K M'; W M = K afterwards."""
    return W + (K - W @ M) @ M.mT


@dataclass
class Pin:
    """One layer's parameters, [weight, *biases], and what keeps them out of span(M)."""

    params: list[nn.Parameter]
    groups: int
    M: Tensor
    C: Tensor
    N: Tensor | None = None  # an orthonormal basis of M's complement, where that is narrower
    before: list[Tensor] | None = None
    steps: int = 0

    @classmethod
    def of(cls, layer: Layer, memory: Memory) -> "Pin":
        pin = cls(layer.params, layer.groups, memory.M, memory.C)
        if memory.M.shape[1] - int(memory.ranks.min()) < memory.M.shape[2]:
            pin.N = complement(memory.M, memory.ranks)
        return pin

    def remember(self) -> None:
        """Before a step: what the update is measured from, where that is needed."""
        self.steps += 1
        if self.N is not None and self.steps % 10:
            self.before = [p.detach().clone() for p in self.params]
        else:
            self.before = None

    def restore(self) -> None:
        """After a step: take the update's part inside span(M) back."""
        if self.N is None or self.before is None:
            excess = self._inner(self.params, self.M) - self.C
            self._add(self.params, excess, self.M, -1)
        else:
            moved = [p - q for p, q in zip(self.params, self.before, strict=True)]
            free = self._inner(moved, self.N)
            for p, q in zip(self.params, self.before, strict=True):
                p.copy_(q)
            self._add(self.params, free, self.N, 1)

    def project(self, grads: Sequence[Tensor]) -> None:
        """Take the gradients' part inside span(M) away, in place."""
        if self.N is None:
            self._add(grads, self._inner(grads, self.M), self.M, -1)
        else:
            free = self._inner(grads, self.N)
            for g in grads:
                g.zero_()
            self._add(grads, free, self.N, 1)

    def follow(self) -> None:
        """The model may have been moved or cast since the task began."""
        device = self.params[0].device
        dtype = torch.promote_types(self.params[0].dtype, torch.float32)
        if self.M.device != device or self.M.dtype != dtype:
            self.M, self.C = self.M.to(device, dtype), self.C.to(device, dtype)
            self.N = self.N.to(device, dtype) if self.N is not None else None

    def _inner(self, tensors: Sequence[Tensor], basis: Tensor) -> Tensor:
        """[weight | biases] times the basis (g, n, k), without joining them: (g, o, k)."""
        weight, *biases = tensors
        kernel = basis.shape[1] - len(biases)
        W = weight.reshape(self.groups, -1, kernel).to(basis.dtype)
        inner = W @ basis[:, :kernel]
        for i, bias in enumerate(biases):
            b = bias.reshape(self.groups, -1, 1).to(basis.dtype)
            inner.addcmul_(b, basis[:, kernel + i : kernel + i + 1])
        return inner

    def _add(self, tensors: Sequence[Tensor], inner: Tensor, basis: Tensor, sign: int) -> None:
        """[weight | biases] += sign * inner basis', in place."""
        weight, *biases = tensors
        kernel = basis.shape[1] - len(biases)
        weight.add_((inner @ basis[:, :kernel].mT).reshape(weight.shape), alpha=sign)
        for i, bias in enumerate(biases):
            change = inner @ basis[:, kernel + i].unsqueeze(2)
            bias.add_(change.reshape(bias.shape), alpha=sign)


class Guard:
    """The pinned layers of the task being learnt, and the hooks that pin them."""

    def __init__(self, pins: list[Pin] | None = None) -> None:
        self.pins = pins or []
        self.paused = False  # while the model holds the weights of another task
        self.frozen: dict[str, nn.Parameter] = {}  # what must not train again

    def watch(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Project what this optimizer does from now on."""
        return [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @torch.no_grad()
    @full_precision
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.paused:
            raise RuntimeError(
                "An optimizer stepped inside `with learner.task(...)`, whose weights are put back "
                "when it is left; train outside of it."
            )
        for name, param in self.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"'{name}' was frozen after the first task and trains again, where nothing "
                    "protects it; set its requires_grad to False."
                )
        for pin in self.pins:
            pin.follow()
            pin.remember()
        # SGD's update is linear in the gradients: projecting it is projecting them. Others rescale
        # by the gradients they have seen, which should be those of the directions still free.
        if type(optimizer) is torch.optim.SGD:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._project_gradients()
            return None

        def projected() -> Any:
            loss = closure()
            self._project_gradients()
            return loss

        return (args[0], projected, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    @torch.no_grad()
    @full_precision
    def _project_gradients(self) -> None:
        for pin in self.pins:
            grads = [p.grad for p in pin.params if p.grad is not None]
            if len(grads) == len(pin.params):
                pin.project(grads)

    @torch.no_grad()
    @full_precision
    def _after_step(self, *_: Any) -> None:
        for pin in self.pins:
            pin.restore()
