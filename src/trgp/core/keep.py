"""Scaled weight projection (paper, section 4.2) as a correction before and after a step.

The paper trains the shared weight W orthogonally to span(M), and one matrix Q_j for each task j in
the trust region: W_eff = W + sum_j W B_j (Q_j - I) B_j'. W B_j does not move, so every Q_j moves
W_eff inside span(M) along the range of C_j = W B_j, and nothing else inside span(M) moves. Hence Q
need not exist. The model's parameter is W_eff itself, K = W_eff M are its coordinates, and

    before the optimizer's step:  T = G M           G     <- G + (P(T) - T) M'
    after it:                     D = W_eff M - K   E = Pi(D)
                                  W_eff <- W_eff - (D - E) M'   K <- K + E

Pi, the reach, projects onto all that any Q could do. P is what the optimizer is shown of the
gradient inside span(M): the paper's joint step of W and Q for an optimizer that is linear in the
gradients, or the reach itself for one that rescales them.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .precision import full_precision

Form = Literal["paper", "range"]
SumRows = Callable[[Tensor], Tensor]  # a sum over rows, from the sum over a process's own


class Block(NamedTuple):
    """Neighbouring columns of a region's M that one set of trusted tasks holds."""

    first: int
    last: int
    gain: Tensor  # [C_j ...] (g, o, k) of the tasks in the set, side by side
    reach: Tensor  # L (g, o, r), an orthonormal basis of the range of gain


class Region(NamedTuple):
    """The protected directions of a layer and, block by block, how far a task may reach into them.

    A direction that no trusted task holds lies in no block: nothing moves there. Without blocks
    this is GPM. Columns are those of the layer's memory in an order of their own.
    """

    M: Tensor  # (g, n, m) orthonormal, but for columns of zeros
    C: Tensor  # (g, o, m), the shared weight's coordinates W M
    blocks: tuple[Block, ...] = ()
    places: Tensor | None = None  # (g, m): each column's place in the memory, -1 for zeros
    sum_rows: SumRows | None = None  # where processes hold rows of W, C and L each

    @property
    def start(self) -> int:
        """The first column of the first block; all later ones lie in blocks."""
        return self.blocks[0].first if self.blocks else self.M.shape[2]


def shown(T: Tensor, region: Region, form: Form, scale_rate: float = 1.0) -> Tensor:
    """P(T): what the optimizer is shown of the gradient's coordinates T (g, o, m)."""
    if form == "range":
        return reached(T, region)
    return _through(T, region, [block.gain for block in region.blocks]) * scale_rate


def reached(D: Tensor, region: Region) -> Tensor:
    """Pi(D): the part of a change D (g, o, m) in coordinates that the trusted tasks allow."""
    return _through(D, region, [block.reach for block in region.blocks])


@full_precision
def filtered(G: Tensor, region: Region, form: Form, scale_rate: float = 1.0) -> Tensor:
    """The gradient G (g, o, n) with its part inside span(M) replaced by P's."""
    T = G @ region.M
    return G + (shown(T, region, form, scale_rate) - T) @ region.M.mT


@full_precision
def kept(W: Tensor, K: Tensor, region: Region) -> tuple[Tensor, Tensor]:
    """W_eff (g, o, n) and its coordinates K after any change of W_eff, kept within the reach."""
    D = W @ region.M - K
    E = reached(D, region)
    return W - (D - E) @ region.M.mT, K + E


@full_precision
def with_coordinates(W: Tensor, M: Tensor, K: Tensor) -> Tensor:
    """W (g, o, n) with its part inside span(M) replaced by K M'; W M = K afterwards."""
    return W + (K - W @ M) @ M.mT


def _through(T: Tensor, region: Region, factors: list[Tensor]) -> Tensor:
    """F F' T at the columns of every block, F its factor; zero at all others."""
    inner = [
        F.mT @ T[:, :, block.first : block.last]
        for block, F in zip(region.blocks, factors, strict=True)
    ]
    if inner and region.sum_rows is not None:  # all blocks in one message
        flat = region.sum_rows(torch.cat([each.flatten() for each in inner]))
        parts = flat.split([each.numel() for each in inner])
        inner = [part.view_as(each) for part, each in zip(parts, inner, strict=True)]
    out = torch.zeros_like(T)
    for block, F, each in zip(region.blocks, factors, inner, strict=True):
        out[:, :, block.first : block.last] = F @ each
    return out
