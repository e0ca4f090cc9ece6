"""A protected layer as a matrix whose inputs are columns.

Every protected layer is seen as W of shape (g, o, n): g groups, o outputs and n inputs per group.
A convolution's kernel is flattened to n = C*k*k, and a bias is one more input that is always 1, so
that weight and bias are protected together. How each kind of module becomes that is in layer_kinds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that is spread over several; any other as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
        return rows


@dataclass(frozen=True)
class Slot:
    """A parameter by its place, since `model.to` or a load may change what is there."""

    module: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.module, self.attribute))


@dataclass(frozen=True)
class Layout:
    """How a parameter holds W (g, o, n)."""

    groups: int = 1  # rows of the parameter are those of one group after another
    transposed: bool = False  # (n, o) in place of (o, n)
    stacked: bool = False  # the first dimension counts the groups: (g, o, n)

    def shape(self, size: Sequence[int]) -> tuple[int, int, int]:
        """(g, o, n) of a parameter of this size."""
        if not (self.transposed or self.stacked):
            rows, *kernel = size
            return self.groups, rows // self.groups, math.prod(kernel)
        groups, first, last = size if self.stacked else (1, *size)
        return (groups, last, first) if self.transposed else (groups, first, last)

    def matrices(self, tensor: Tensor) -> Tensor:
        """A parameter, or its gradient, as (g, o, n): a view of a contiguous one."""
        if not (self.transposed or self.stacked):
            return tensor.reshape(self.shape(tensor.shape))  # of no row, too
        matrices = tensor if self.stacked else tensor.unsqueeze(0)
        return matrices.mT if self.transposed else matrices

    def tensor(self, W: Tensor, like: Tensor) -> Tensor:
        """W (g, o, n) in the shape of a parameter."""
        return (W.mT if self.transposed else W).reshape(like.shape)


PLAIN = Layout()


@dataclass(frozen=True)
class Site:
    """One place where a layer's weight meets its inputs."""

    module: nn.Module
    weight: Slot
    bias: Slot | None
    inputs: Callable[..., list[Tensor]]  # batches the weight is applied to, from the module's call
    columns: Callable[[Any, Tensor], Tensor]  # one such input as (g, N, n)
    layout: Layout = PLAIN
    unfolds: int = 1  # how many times a number of an input occurs in the columns


@dataclass
class Layer:
    """A protected weight, the biases learnt with it, and every place where it is used."""

    name: str
    weight: Slot
    biases: list[Slot]
    layout: Layout
    sites: list[Site]

    @property
    def groups(self) -> int:
        """g."""
        return self.layout.groups

    @property
    def shape(self) -> tuple[int, int, int]:
        """(g, o, n) over all processes, the biases counted as inputs."""
        groups, out, n = self.layout.shape(self.weight.param.shape)
        return groups, out, n + len(self.biases)

    @property
    def dtype(self) -> torch.dtype:
        """The memory's precision: half precision cannot hold an orthonormal basis."""
        return torch.promote_types(self.weight.param.dtype, torch.float32)

    @property
    def params(self) -> list[nn.Parameter]:
        return [slot.param for slot in (self.weight, *self.biases)]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """[weight, *biases] as one (g, o, n) matrix, through which a gradient finds its way."""
        weight, *biases = tensors
        parts = [self.layout.matrices(weight)]
        parts += [self.by_group(bias) for bias in biases]
        parts = [part.to(self.dtype) for part in parts]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def apart(self, W: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """W (g, o, n) in the shapes of [weight, *biases]."""
        weight, *biases = like
        kernel = W.shape[2] - len(biases)
        parts = [self.layout.tensor(W[..., :kernel], weight)]
        return parts + [W[..., kernel + i].reshape(b.shape) for i, b in enumerate(biases)]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[weight, *biases], or their gradients, as one (g, o, n) matrix."""
        return self.joined([t.detach() for t in tensors])

    @property
    def weights(self) -> list[Tensor]:
        """The values of `params`, of which this process may hold some rows only."""
        return [local(param) for param in self.params]

    def by_group(self, bias: Tensor) -> Tensor:
        """A bias (g * o) as a column (g, o, 1) per group; o may be zero."""
        return bias.reshape(self.groups, len(bias) // self.groups, 1)

    def matrix(self) -> Tensor:
        """W, the rows that this process holds; a view of the parameter where that is possible."""
        return self.pack(self.weights)

    @torch.no_grad()
    def assign(self, W: Tensor) -> None:
        """Write W (g, o, n) back into the parameters."""
        weights = self.weights
        for weight, part in zip(weights, self.apart(W, weights), strict=True):
            weight.copy_(part)

    def columns(self, site: Site, x: Tensor) -> Tensor:
        """The layer's inputs at a site as (g, N, n), with a 1 for the bias that is added there."""
        columns = site.columns(site.module, x.detach())
        if not self.biases:
            return columns
        added = site.bias.param if site.bias is not None else None
        # Filled on the device: a copy to it could not be captured in a graph.
        ones = [columns.new_full((*columns.shape[:2], 1), b.param is added) for b in self.biases]
        return torch.cat([columns, *ones], dim=2)


@dataclass(frozen=True)
class Refusal:
    """Why a part of a model cannot be learnt with, and what helps."""

    kind: type[Exception]
    why: str
    fix: str

    def error(self) -> Exception:
        """Return the refusal as an exception of its kind."""
        return self.kind(f"{self.why}; {self.fix}.")


def join(prefix: str, name: str) -> str:
    """The dotted name of something inside a module."""
    return f"{prefix}.{name}" if prefix else name
