"""Scaled weight projection (paper, section 4.2): old tasks' frozen weights, reused through Q.

W_eff = W + sum over j in the trust region of W B_j (Q_j - I) B_j'. What is stored and learnt is
S_j = Q_j - I of size r_j x r_j, so that a task starts at zero (W_eff = W) and weight decay pulls
towards the identity.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .layers import Layer
from .precision import full_precision


def effective_weight(W: Tensor, bases: Sequence[Tensor], scalings: Sequence[Tensor]) -> Tensor:
    """W (g, o, n) + sum_j (W B_j) S_j B_j', with B_j (g, n, r_j), S_j = Q_j - I (g, r_j, r_j)."""
    total = W
    for B, S in zip(bases, scalings, strict=True):
        total = total + ((W @ B) @ S) @ B.mT
    return total


class Scaling(nn.Module):
    """The scalings S_j of one layer for the task being learnt, and the change they make to W."""

    def __init__(self, coordinates: Sequence[Tensor], bases: Sequence[Tensor]) -> None:
        """Of the trusted tasks: C_j = W B_j (g, o, r_j) and B_j (g, n, r_j).

        C_j is a constant: W moves orthogonally to every B_j, and the gradient that would reach W
        through it lies in span(M), where the projection removes it.
        """
        super().__init__()
        self.S = nn.ParameterList(
            nn.Parameter(C.new_zeros(len(C), C.shape[2], C.shape[2])) for C in coordinates
        )
        for j, C in enumerate(coordinates):
            self.register_buffer(f"C{j}", C, persistent=False)
        self.register_buffer("B", torch.cat(list(bases), dim=2), persistent=False)

    @full_precision
    def change(self, first: int, last: int) -> Tensor:
        """Columns first..last of W_eff - W = [C_1 S_1, C_2 S_2, ...] [B_1, B_2, ...]'."""
        C = [self.get_buffer(f"C{j}") for j in range(len(self.S))]
        B = self.get_buffer("B")[:, first:last]
        if B.shape[1] == 1:  # a bias: from the right every product is with a vector
            parts = B.mT.split([S.shape[1] for S in self.S], dim=1)
            products = [c @ (S @ b) for c, S, b in zip(C, self.S, parts, strict=True)]
            return torch.stack(products).sum(0)
        return torch.cat([c @ S for c, S in zip(C, self.S, strict=True)], dim=2) @ B.mT


class Scaled(nn.Module):
    """A parametrization of a weight (or a bias): itself, plus its columns of the layer's change."""

    def __init__(self, scaling: Scaling, first: int, last: int) -> None:
        super().__init__()
        self.scaling = scaling
        self.first, self.last = first, last

    def forward(self, tensor: Tensor) -> Tensor:
        change = self.scaling.change(self.first, self.last)
        return tensor + change.reshape(tensor.shape).to(tensor.dtype)


def scale(layer: Layer, scaling: Scaling) -> None:
    """Let the layer compute with its effective weight, wherever it is used."""
    kernel = layer.shape[2] - len(layer.biases)
    columns = {id(layer.weight.param): (0, kernel)}
    for i, bias in enumerate(layer.biases):
        columns[id(bias.param)] = (kernel + i, kernel + i + 1)
    places = {
        slot: Scaled(scaling, *columns[id(slot.param)])
        for slot in layer.places
        if id(slot.param) in columns
    }
    for slot, scaled in places.items():
        parametrize.register_parametrization(slot.module, slot.attribute, scaled, unsafe=True)


def unscale(layer: Layer) -> None:
    """Back to plain parameters, holding the shared weight.

    Not by torch's own removal: it takes the attribute from a class that copies of the module made
    in the meantime share, and leaves the parameters in another order.
    """
    for module in layer.order:
        if parametrize.is_parametrized(module):
            lists = cast(nn.ModuleDict, module.parametrizations)
            originals = {k: cast(nn.Parameter, each.original) for k, each in lists.items()}
            plain = module._parameters | originals
            module.__class__ = type(module).__bases__[0]
            del module.parametrizations
            module._parameters.clear()
            module._parameters |= {key: plain.pop(key) for key in layer.order[module]} | plain
