"""The effective weight of the literal form, and its gradient, in few and small products.

W_eff = W + W B S B', where B has the bases of all trusted tasks side by side and S their S_j on its
diagonal. W moves orthogonally to M, hence of C = W B only the columns drift that belong to a loose
direction u, one outside span(M): all others are constants, and the gradient that would reach W
through them lies in span(M), where the projection removes it. So with G = dL/dW_eff, and s' the
rows of S B' that belong to the loose directions U,

    W_eff = W + C S B'        dL/dS = C' G B        dL/dW = G + G s U'  up to what is removed.

Shapes: W (g, o, n), B (g, n, r), S (g, r, r), U (g, n, l). What is called in every step depends on
shapes alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .precision import full_precision
from .products import plus_product, product


def effective_weight(W: Tensor, bases: Sequence[Tensor], scalings: Sequence[Tensor]) -> Tensor:
    """W (g, o, n) + sum_j (W B_j) S_j B_j', with B_j (g, n, r_j), S_j = Q_j - I (g, r_j, r_j)."""
    total = W
    for B, S in zip(bases, scalings, strict=True):
        total = total + ((W @ B) @ S) @ B.mT
    return total


class Trusted(NamedTuple):
    """Constants of a layer while a task is learnt."""

    B: Tensor  # (g, n, r)
    C: Tensor  # (g, o, r) = W B at the beginning
    U: Tensor  # (g, n, l): the loose directions
    places: Tensor  # (l): where in B they are


def scaled(W: Tensor, S: Tensor, task: Trusted, widths: Sequence[int]) -> Tensor:
    """W_eff, to be differentiated by W, but for what a projection removes, and by S.

    widths: of the bases, whose S_j are the only blocks of S that are read and get a gradient.
    """
    made: Tensor = _Scaled.apply(W, S, *task, widths)  # type: ignore[no-untyped-call]
    return made


class _Scaled(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(
        ctx: Any,
        W: Tensor,
        S: Tensor,
        B: Tensor,
        C: Tensor,
        U: Tensor,
        places: Tensor,
        widths: Sequence[int],
    ) -> Tensor:
        if len(places):
            C = C.index_copy(2, places, product(W, U))
        ctx.save_for_backward(S, B, C, U, places)
        ctx.widths = widths
        each = zip(C.split(widths, 2), on_diagonal(S, widths), strict=True)
        return plus_product(W, torch.cat([product(C_j, S_j) for C_j, S_j in each], 2), B.mT)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        S, B, C, U, places = ctx.saved_tensors
        GB = product(G, B)
        dS = torch.zeros_like(S)
        each = zip(C.split(ctx.widths, 2), GB.split(ctx.widths, 2), strict=True)
        for dS_j, (C_j, GB_j) in zip(on_diagonal(dS, ctx.widths), each, strict=True):
            dS_j.copy_(product(C_j.mT, GB_j))
        if len(places):
            s = product(B, S.index_select(1, places).mT)
            G = plus_product(G, product(G, s), U.mT)
        return G, dS, *[None] * 5


def on_diagonal(S: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """The blocks S_j of S, as views."""
    rows = [part.split(widths, 2) for part in S.split(widths, 1)]
    return [row[j] for j, row in enumerate(rows)]
