"""Keeps any optimizer's update out of the protected space.

The shared weight's coordinates in span(M) are known constants, C = W M. Whatever an optimizer does
(momentum, weight decay, element-wise rescaling), writing them back after its step,
W <- W + (C - W M) M', removes exactly the part of the update that lies in span(M), and rounding
cannot add up over steps.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .layers import Layer


def with_coordinates(W: Tensor, M: Tensor, K: Tensor) -> Tensor:
    """W (g, o, n) with its part inside span(M) replaced by K M'; W M = K afterwards."""
    return W + (K - W @ M) @ M.mT


def project_(layer: Layer, tensors: list[Tensor], M: Tensor, C: Tensor | None) -> None:
    """`with_coordinates` in place on [weight, *biases] or on their gradients (C = None means 0)."""
    weight, *biases = tensors
    kernel = M.shape[1] - len(biases)
    excess = weight.reshape(layer.groups, -1, kernel).to(M.dtype) @ M[:, :kernel]
    for i, bias in enumerate(biases):
        excess += bias.reshape(layer.groups, -1, 1).to(M.dtype) * M[:, kernel + i : kernel + i + 1]
    if C is not None:
        excess -= C
    weight -= (excess @ M[:, :kernel].mT).reshape(weight.shape)
    for i, bias in enumerate(biases):
        bias -= (excess @ M[:, kernel + i].unsqueeze(2)).reshape(bias.shape)


class Guard:
    """The pinned layers of the task being learnt, and the hooks that pin them."""

    def __init__(self) -> None:
        self.pins: list[tuple[Layer, Tensor, Tensor]] = []  # layer, M, C = W M

    def watch(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Project what this optimizer does from now on."""
        handles = [optimizer.register_step_post_hook(self._pin)]
        # SGD's update is linear in the gradients: projecting it is projecting them. Others rescale
        # by the gradients they have seen, which should be those of the directions still free.
        if type(optimizer) is not torch.optim.SGD:
            handles.append(optimizer.register_step_pre_hook(self._project_gradients))
        return handles

    @torch.no_grad()
    def _pin(self, *_: Any) -> None:
        self._follow_model()
        for layer, M, C in self.pins:
            project_(layer, [*layer.params], M, C)

    @torch.no_grad()
    def _project_gradients(self, *_: Any) -> None:
        self._follow_model()
        for layer, M, _C in self.pins:
            grads = [p.grad for p in layer.params if p.grad is not None]
            if len(grads) == len(layer.params):
                project_(layer, grads, M, None)

    def _follow_model(self) -> None:
        """The model may have been moved or cast since the task began."""
        for i, (layer, M, C) in enumerate(self.pins):
            device, dtype = layer.weight.param.device, layer.dtype
            if M.device != device or M.dtype != dtype:
                self.pins[i] = layer, M.to(device, dtype), C.to(device, dtype)
