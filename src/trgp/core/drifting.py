"""The literal step of TRGP by whole matrices, also where bases leave span(M).

The literal form learns W and S_j = Q_j - I of every trusted task j, and a layer computes with
W_eff = W + sum_j W B_j S_j B_j'. Let u_j be the last column of B_j. It may lie outside span(M); the
others, B_j-, lie inside. W moves orthogonally to M, hence C_j = W B_j- is constant, and c_j = W u_j
drifts. With s_j' and L_j the last row and the others of S_j B_j', and G = dL/dW_eff, a step is

    W   <- W   - lr   (G + sum_j G s_j u_j') (I - M M')        s_j <- s_j - lr_q B_j B_j' G' c_j
    L_j <- L_j - lr_q C_j' G B_j B_j'

So L_j is what it was plus C_j' Y_j (times lr_q / lr), with Y_j <- Y_j - lr G B_j B_j', and what is
added to W_eff = W + sum_j C_j L_j + c_j s_j' is what is added to

    W + sum_j A_j Y_j + c_j s_j'        with A_j = C_j C_j' lr_q / lr.

As in the native form the network's parameter is W_eff itself, and no shape in a step depends on how
many columns a basis has. It is exact for plain SGD: S_j B_j' has all of S_j, whose columns are
coordinates in B_j, and a column of zeros in a basis changes nothing; a basis without columns is
taken for one such.

Shapes: W (g, o, n), B_j (g, n, r_j), those of what a step reads as in `native.Dense`, for K tasks
of which some may be missing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import native
from .products import plus_product, product


class Fixed(NamedTuple):
    """Constants of a layer while a task is learnt."""

    P: Tensor  # (g, n, (1 + K) n): I - M M' and the B_j B_j' side by side
    gains: Tensor  # (g, o, (1 + K) o): I and the A_j side by side
    U: Tensor  # (g, n, K): the u_j
    V: Tensor  # (g, K, (1 + K) n): U' (I - M M'), and zeros


class Moving(NamedTuple):
    """Moving parts of a layer next to W_eff."""

    Z: Tensor  # (g, o, (1 + K) n): W and the Y_j side by side
    c: Tensor  # (g, o, K): the c_j
    s: Tensor  # (g, K, K n): s_j' in the j-th row and block; the other blocks are read by nobody


class Ahead(NamedTuple):
    """The part of a step that needs inputs but no gradient."""

    right: Tensor  # (g, b, (1 + K) n): what delta' makes the change of W and the Y_j of
    drift: Tensor  # (g, b, K): and that of the c_j


def constant(M: Tensor, C: Tensor, B: Tensor) -> Tensor:
    """C_j = W B_j- (g, o, r_j - 1) in double precision, from C = W M."""
    return C.double() @ (M.double().mT @ B[..., :-1].double())


def fixed(
    M: Tensor, o: int, bases: Sequence[Tensor], C_j: Sequence[Tensor], K: int, ratio: float
) -> Fixed:
    """Make the constants of a layer with o outputs that may trust K tasks; ratio: lr_q / lr."""
    g, n, _ = M.shape
    free = native.outside(M)
    bases = [*map(_some, bases)]
    P = [free, *((B.double() @ B.double().mT).to(M) for B in bases)]
    one = torch.eye(o, dtype=M.dtype, device=M.device).expand(g, o, o)
    gains = [one, *((ratio * C @ C.mT).to(M) for C in C_j)]
    U = _side_by_side([B[..., -1:] for B in bases], (g, n, 1), K, M)
    return Fixed(
        _side_by_side(P, (g, n, n), 1 + K, M),
        _side_by_side(gains, (g, o, o), 1 + K, M),
        U,
        pad(U.mT @ free, (0, K * n)),
    )


def enter(
    W: Tensor, bases: Sequence[Tensor], scalings: Sequence[Tensor], K: int
) -> tuple[Tensor, Moving]:
    """W_eff, and what moves, of a layer that has learnt S_j so far."""
    g, o, n = W.shape
    wide = W.double()
    bases = [*map(_some, bases)]
    scalings = [S if S.shape[2] else pad(S, (0, 1, 0, 1)) for S in scalings]
    rows = [S.double() @ B.double().mT for B, S in zip(bases, scalings, strict=True)]
    R = sum(
        ((wide @ B.double()[..., :-1]) @ row[:, :-1] for B, row in zip(bases, rows, strict=True)),
        torch.zeros_like(wide),
    )
    c = _side_by_side([wide @ B[..., -1:].double() for B in bases], (g, o, 1), K, wide)
    s = wide.new_zeros(g, K, K, n)
    for j, row in enumerate(rows):
        s[:, j, j] = row[:, -1]
    W_eff = wide + R + c @ s.diagonal(0, 1, 2).mT
    Z = pad(W, (0, K * n))
    return W_eff.to(W), Moving(Z, c.to(W), s.flatten(2).to(W))


def ahead(task: Fixed, s: Tensor, x: Tensor) -> Ahead:
    """Project inputs x (b, n); s is as the step finds it."""
    g, n, _ = task.U.shape
    x = x.reshape(g, -1, n)
    right = plus_product(native.projected(task.P, x), product(x, _rows(s).mT), task.V)
    return Ahead(right, product(right[..., :n], task.U))


def step(
    task: Fixed,
    now: Moving,
    W_eff: Tensor,
    delta: Tensor,
    inputs: Ahead,
    lr: float | Tensor,
    ratio: float,
) -> tuple[Tensor, Moving]:
    """W_eff and the rest after a step along G = delta' x."""
    g, n, _ = task.U.shape
    o = W_eff.shape[1]
    along = lr * delta.reshape(g, -1, o)
    left = product(along, task.gains).view(g, -1, o)
    W_eff = plus_product(W_eff, left.mT, inputs.right.view(g, -1, n), -1)
    Z = plus_product(now.Z, along.mT, inputs.right, -1)
    c = plus_product(now.c, along.mT, inputs.drift, -1)
    s = plus_product(now.s, product(along, now.c).mT, inputs.right[..., n:], -ratio)
    W_eff = plus_product(W_eff, now.c, _rows(now.s), -1)
    return plus_product(W_eff, c, _rows(s)), Moving(Z, c, s)


def leave(
    now: Moving,
    bases: Sequence[Tensor],
    C_j: Sequence[Tensor],
    scalings: Sequence[Tensor],
    ratio: float,
) -> tuple[Tensor, list[Tensor]]:
    """W and the S_j, which were `scalings` when it was entered."""
    W, *Y = now.Z.split(now.s.shape[2] // now.s.shape[1], 2)
    found = []
    for j, (B, S) in enumerate(zip(bases, scalings, strict=True)):
        learnt = ratio * C_j[j].mT @ Y[j].double() @ B.double()
        last = _rows(now.s)[:, j : j + 1].double() @ B.double()
        found.append(torch.cat([S[:, :-1] + learnt, last], 1)[:, : S.shape[1]].to(S))
    return W, found


def _some(B: Tensor) -> Tensor:
    """With a column of zeros where it has none."""
    return B if B.shape[2] else pad(B, (0, 1))


def _rows(s: Tensor) -> Tensor:
    """The s_j' (g, K, n), of which s has one in every row."""
    g, K, _ = s.shape
    return s.view(g, K, K, -1).diagonal(0, 1, 2).mT


def _side_by_side(
    parts: Sequence[Tensor], shape: tuple[int, ...], count: int, like: Tensor
) -> Tensor:
    """Matrices of one shape up to a count, missing ones zero."""
    return torch.cat([*parts, *[like.new_zeros(shape)] * (count - len(parts))], 2)
