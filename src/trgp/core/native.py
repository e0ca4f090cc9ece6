"""TRGP in native form: the exact SGD step of the paper, without Q and without a wrapper.

While a task is learnt W moves only orthogonally to M, and the basis B_j of every old task j in the
trust region is a choice of M's columns. Hence C = W M is constant, and with G = dL/dW_eff the paper
(sections 4.2 and 4.4) does nothing but

    dL/dW, projected = G (I - M M')        dL/dQ_j = C_j' T_j        with T = G M,

where X_j keeps the columns of X that belong to B_j and zeroes the others. So the parameter can be
W_eff itself, and a step of both W and the Q_j is

    W_eff <- W_eff - lr (G - T M' + S M')       with S = sum_j A_j T_j and A_j = C_j C_j',

the A_j times lr_q / lr where Q has a rate of its own. What a step moves along is linear in G, and
the same map from a task's first step to its last: so this is exact for SGD with or without
momentum, and other optimizers need the literal form. With no old task selected it is GPM, and with
m = 0 plain SGD. Nothing but W_eff changes: it holds all that the Q_j have learnt, and they can be
told from it.

Shapes: W (g, o, n), M (g, n, m), K selected old tasks. A zero column of M contributes nothing, so
groups, and runs batched by vmap, may be padded to one m. What is called in every step depends on
shapes alone: it runs eagerly, under vmap and inside a CUDA graph.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .decompositions import cholesky, cholesky_solve
from .products import into_product, plus_product, product
from .subspace import columns_of

Form = Literal["gradient", "factored"]

SPARED: dict[Form, int] = {"factored": 1_000_000, "gradient": 100_000}
"""Multiplications in the time of the operations that whole matrices spare a step, about 30 and 10
microseconds on one core of a CPU."""

RUN = 16  # numbers: rows that are a multiple of it long begin where a GPU can read several at once


class Task(NamedTuple):
    """Constants of a layer while a task is learnt."""

    M: Tensor  # (g, n, m)
    C: Tensor  # (g, o, m) = W M
    masks: Tensor  # (g, K, m): for every j 1 at the columns that make B_j
    signs: Tensor  # (g, 1 + K, m): -1 everywhere, then the masks times lr_q / lr
    gain: Tensor
    """A_j (g, o, K, o), or lr_q / lr times N (g, m, m), how many B_j hold both of two columns."""


class Product(NamedTuple):
    """A weight's direction, or a part of it, as two factors: left' right."""

    left: Tensor  # (g, r, o)
    right: Tensor  # (g, r, n)


class Dense(NamedTuple):
    """The constants as whole matrices, whose shapes depend on K and the layer alone."""

    P: Tensor  # (g, n, (1 + K) n): I - M M' and the M_j M' side by side
    gains: Tensor  # (g, o, (1 + K) o): I and the A_j, these times lr_q / lr


def begin(W: Tensor, M: Tensor, masks: Sequence[Tensor], form: Form, ratio: float = 1.0) -> Task:
    """The constants of a task that starts at the shared weight W, which is then W_eff.

    `masks` are those of the selected old tasks, (g, m) or narrower where M has grown since. ratio:
    lr_q / lr.
    """
    M = aligned(M)
    m = M.shape[2]
    C = W @ M
    wide = [pad(mask, (0, m - mask.shape[1])).to(W.dtype) for mask in masks]
    each = torch.stack(wide, 1) if wide else W.new_zeros(len(W), 0, m)
    signs = torch.cat([-W.new_ones(len(W), 1, m), ratio * each], 1)
    return Task(M, C, each, signs, gain_of(C, each, form, ratio))


def aligned(M: Tensor) -> Tensor:
    """On a GPU with columns of zeros, so that it reads every row four numbers at a time."""
    more = -M.shape[2] % RUN if M.is_cuda else 0
    return pad(M, (0, more)) if more else M


def gain_of(C: Tensor, masks: Tensor, form: Form, ratio: float) -> Tensor:
    """A_j = C_j C_j' of every selected task, or where applying that costs more, N."""
    outer, inner = gain_costs(form, 1, masks.shape[1], *C.shape[1:])
    if outer > inner:
        return ratio * masks.mT @ masks
    C_j = C.unsqueeze(1) * masks.unsqueeze(2)
    return (C_j @ C_j.mT).transpose(1, 2).contiguous()


def dense(task: Task, K: int, ratio: float) -> Dense:
    """Make the constants of a task that may select K old ones; lr_q is lr times the ratio.

    So runs with other memories can be stacked on each other, in the fewest operations a step.
    """
    M, C = task.M.double().unsqueeze(1), task.C.double().unsqueeze(1)
    more = K - task.masks.shape[1]
    masks = pad(task.masks.double(), (0, 0, 0, more)).unsqueeze(2)  # (g, K, 1, m)
    P = torch.cat([outside(task.M).unsqueeze(1), ((M * masks) @ M.mT).to(task.M)], 1)
    one = _one(task.C.shape[1], task.M).expand(len(C), 1, -1, -1)
    gains = torch.cat([one, (ratio * (C * masks) @ C.mT).to(task.M)], 1)
    return Dense(*(X.transpose(1, 2).flatten(2) for X in (P, gains)))


def outside(M: Tensor) -> Tensor:
    """I - M M' (g, n, n)."""
    wide = M.double()
    return (_one(M.shape[1], wide) - wide @ wide.mT).to(M)


def _one(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def projected(P: Tensor, x: Tensor) -> Tensor:
    """x P (g, b, ...) for projectors P (g, n, ...) that are given whole: it needs no gradient."""
    return product(x.reshape(*P.shape[:1], -1, P.shape[1]), P)


def dense_factors(task: Dense, delta: Tensor, xP: Tensor) -> Product:
    """All (delta A_j)' (x P_j) in one product, 0 being the free one."""
    g, n, _ = task.P.shape
    o = task.gains.shape[1]
    left = product(delta.reshape(g, -1, o), task.gains).view(g, -1, o)
    return Product(left, xP.view(g, -1, n))


def dense_gradient(task: Dense, G: Tensor) -> Product:
    """The direction from the gradient G (g, o, n): sum_j A_j G P_j."""
    g, o, n = G.shape
    each = product(G, task.P).view(g, o, -1, n).transpose(1, 2).flatten(1, 2)
    return Product(task.gains.mT, each)


def scaled_factors(task: Task, delta: Tensor, x: Tensor) -> Product:
    """A linear layer's direction, from the factors of G = delta' x, without ever forming G.

    delta (b, o) is the gradient of the layer's output, x (b, n) its input, with a column of ones
    where there is a bias. With z = x M, delta' (x - z M') = G (I - M M') and (delta A_j)' (z_j M')
    = A_j T_j M': a product of the size of a weight gradient.
    """
    g, n, _ = task.M.shape
    o, K = task.C.shape[1], task.masks.shape[1]
    delta, x = delta.reshape(g, -1, o), x.reshape(g, -1, n)
    z = product(x, task.M)
    if task.gain.dim() == 4:
        scaled = product(delta, task.gain.flatten(2))
    else:
        each = product(delta, task.C).unsqueeze(2) * task.masks.unsqueeze(1)
        scaled = product(each.flatten(1, 2), task.C.mT)
    b = delta.shape[1]
    left = torch.cat([delta.unsqueeze(2), scaled.view(g, b, K, o)], 2)
    each = z.unsqueeze(2) * task.signs.unsqueeze(1)
    right = product(each.flatten(1, 2), task.M.mT).view(g, b, 1 + K, n)
    right[:, :, 0] += x
    return Product(left.flatten(1, 2), right.flatten(1, 2))


def scaled_excess(task: Task, G: Tensor) -> Product:
    """The excess of a step along G (g, o, n) itself: (T - S) M'."""
    T = product(G, task.M)
    if task.gain.dim() == 4:
        # Below each other, times lr_q / lr.
        T_j = (task.signs[:, 1:].unsqueeze(2) * T.unsqueeze(1)).flatten(1, 2)
        A = task.gain.flatten(2)
    else:
        # C_j' T_j is C' T at the rows and columns of task j, so N sums all tasks in one product.
        T_j = task.gain * product(task.C.mT, T)
        A = task.C
    return Product(into_product(T, A, T_j, -1).mT, task.M.mT)


def taken_off(W: Tensor, along: Product) -> Tensor:
    """W - left' right, in the memory of W if it is no batched one."""
    return into_product(W, along.left.mT, along.right, -1)


def narrowed_factors(delta: Tensor, xP: Tensor) -> Product:
    """G P = delta' x P for one projector."""
    return Product(delta.reshape(*xP.shape[:2], -1), xP)


def free_factors(M: Tensor, delta: Tensor, x: Tensor) -> Product:
    """GPM's G (I - M M') from the factors of G: it is the inputs that are projected."""
    g, n, _ = M.shape
    x = x.reshape(g, -1, n)
    free = plus_product(x, product(x, M), M.mT, -1)
    return Product(delta.reshape(g, x.shape[1], -1), free)


def free_excess(M: Tensor, G: Tensor) -> Product:
    """The part that GPM takes off G: T M'."""
    return Product(product(G, M).mT, M.mT)


def shift(task: Task, W: Tensor) -> Tensor:
    """(W_eff - W) M (g, o, m), which is sum_j C_j (Q_j - I) at the columns of every task j."""
    return (W.double() @ task.M.double() - task.C).to(task.C)


def scalings(task: Task, W: Tensor) -> list[Tensor]:
    """S_j = Q_j - I (g, r_j, r_j) of the selected old tasks, from W_eff in the digits it has.

    Every step changes a column of all S_j that have it by C_j' t, with one t for all of them. So
    S_j is C_j' Y_j, and D = (W_eff - W) M has the columns sum_j A_j y, over the j that have them.
    The shared weight needs none of this: it is `guard.with_coordinates(W_eff, M, C)`.
    """
    D, C, masks = shift(task, W).double(), task.C.double(), task.masks > 0
    Y = torch.zeros_like(D)
    for g, columns in enumerate(masks.mT):
        for held in columns.unique(dim=0):
            if held.any():
                same = (columns == held).all(1)
                A = (C[g] * columns[:, held].sum(1)) @ C[g].mT
                Y[g, :, same] = _solved(A, D[g, :, same], W.dtype)
    each = [columns_of(C, mask).mT @ columns_of(Y, mask) for mask in masks.unbind(1)]
    return [S.to(task.C) for S in each]


def _solved(A: Tensor, D: Tensor, dtype: torch.dtype) -> Tensor:
    """Y with A Y = D, for a D that A can make, known to a dtype's digits.

    A can be singular. What it all but forgets is not amplified to more than rounding is worth.
    """
    ridge = max(1e-3 * torch.finfo(dtype).eps, 1e-14) * A.diagonal().sum()
    shifted = A + (ridge + torch.finfo(A.dtype).tiny) * _one(len(A), A)
    return cholesky_solve(D, cholesky(shifted))


def costs(b: int, K: int, g: int, o: int, n: int, m: int) -> dict[Form, int]:
    """Multiplications of one step of a linear layer at batch b, from (delta, x) to the weight."""
    gradient = b * o * n + 2 * o * n * m + min(gain_costs("gradient", b, K, o, m))
    factored = b * m * n + (1 + K) * b * n * (m + o) + min(gain_costs("factored", b, K, o, m))
    return {"gradient": g * gradient, "factored": g * factored}


def gain_costs(form: Form, b: int, K: int, o: int, m: int) -> tuple[int, int]:
    """Multiplications in applying all A_j: as they are, and as C_j C_j'."""
    if form == "gradient":
        return K * o * o * m, 2 * o * m * m
    return K * b * o * o, (1 + K) * b * o * m


def cheaper_form(b: int, K: int, g: int, o: int, n: int, m: int) -> Form:
    """The form a linear layer should use; a convolution has no factors and uses the gradient."""
    counted = costs(b, K, g, o, n, m)
    return "factored" if counted["factored"] < counted["gradient"] else "gradient"


def dense_pays(b: int, K: int, g: int, o: int, n: int, m: int) -> bool:
    """Whether a linear layer so small gains more by fewer operations than whole matrices cost."""
    form = cheaper_form(b, K, g, o, n, m)
    spared = costs(b, K, g, o, n, m)[form] + SPARED[form]
    return min(dense_costs(b, K, g, o, n).values()) < spared


def dense_costs(b: int, K: int, g: int, o: int, n: int) -> dict[Form, int]:
    """Costs like `costs`, for whole matrices."""
    gradient = b * o * n + (1 + K) * o * n * (n + o)
    factored = (1 + K) * b * (n * n + o * o + o * n)
    return {"gradient": g * gradient, "factored": g * factored}
