"""TRGP in native form: the exact SGD step of the paper, without Q and without a wrapper.

While a task is learnt W moves only orthogonally to M, and the basis B_j of every old task j in the
trust region is a choice of M's columns. Hence C = W M is constant, and with G = dL/dW_eff the paper
(sections 4.2 and 4.4) does nothing but

    dL/dW, projected = G (I - M M')        dL/dQ_j = C_j' T_j        with T = G M,

where X_j keeps the columns of X that belong to B_j and zeroes the others. So the parameter can be
W_eff itself, and a step of both W and the Q_j is

    W_eff <- W_eff - lr (G - T M') - lr_q S M'       with S = sum_j A_j T_j and A_j = C_j C_j'.

This is exact for SGD with or without momentum, whose steps are linear in the gradients; other
optimizers need the literal form. With no old task selected it is GPM, and with m = 0 plain SGD.
Nothing but W_eff changes: it holds all that the Q_j have learnt, and they can be told from it.

Shapes: W (g, o, n), M (g, n, m), K selected old tasks. A zero column of M contributes nothing, so
groups, and runs batched by vmap, may be padded to one m. What is called in every step depends on
shapes alone: it runs eagerly, under vmap and inside a CUDA graph, and lr and lr_q may be tensors.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .decompositions import cholesky, cholesky_solve
from .subspace import columns_of
from .vmapped import is_batchedtensor, runs_first

Form = Literal["gradient", "factored"]
Rate = float | Tensor

SPARED: dict[Form, int] = {"factored": 1_000_000, "gradient": 100_000}
"""Multiplications in the time of the operations that whole matrices spare a step, about 30 and 10
microseconds on one core of a CPU."""


class Task(NamedTuple):
    """What stays constant in a layer while a task is learnt."""

    M: Tensor  # (g, n, m)
    C: Tensor  # (g, o, m) = W M
    signs: Tensor  # (g, 1 + K, m): -1 everywhere, then for every j 1 at the columns that make B_j
    gain: Tensor  # A_j (g, o, K, o), or N (g, m, m): how many B_j hold both of two columns

    @property
    def masks(self) -> Tensor:
        """(g, K, m), of the selected tasks alone."""
        return self.signs[:, 1:]


class Momentum(NamedTuple):
    """The filtered gradient in the factored form, split where lr and lr_q part ways."""

    free: Tensor  # (g, o, n), of G (I - M M')
    scaled: Tensor  # (g, o, n), of S M'


class Dense(NamedTuple):
    """The same constants as whole matrices, whose shapes depend on K and the layer alone."""

    P: Tensor  # (g, n, (1 + K) n): I - M M' and the M_j M' side by side
    gains: Tensor  # (g, o, (1 + K) o): I and the A_j, these times lr_q / lr


def begin(W: Tensor, M: Tensor, masks: Sequence[Tensor], form: Form) -> Task:
    """The constants of a task that starts at the shared weight W, which is then W_eff.

    `masks` are those of the selected old tasks, (g, m) or narrower where M has grown since.
    """
    m = M.shape[2]
    C = W @ M
    wide = [pad(mask, (0, m - mask.shape[1])).to(W.dtype) for mask in masks]
    signs = torch.stack([-W.new_ones(len(W), m), *wide], 1)
    return Task(M, C, signs, gain_of(C, signs[:, 1:], form))


def gain_of(C: Tensor, masks: Tensor, form: Form) -> Tensor:
    """A_j = C_j C_j' of every selected task, or where applying that costs more, N."""
    outer, inner = gain_costs(form, 1, masks.shape[1], *C.shape[1:])
    if outer > inner:
        return masks.mT @ masks
    C_j = C.unsqueeze(1) * masks.unsqueeze(2)
    return (C_j @ C_j.mT).transpose(1, 2).contiguous()


def dense(task: Task, K: int, ratio: float) -> Dense:
    """Of a task that may select K old ones, where lr_q is lr times the ratio.

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


def dense_step(task: Dense, W: Tensor, G: Tensor, lr: Rate) -> Tensor:
    """One step from the gradient G (g, o, n): sum_j A_j G P_j is taken off, with 0 the free one."""
    g, o, n = W.shape
    each = _product(lr * G, task.P).view(g, o, -1, n).transpose(1, 2).flatten(1, 2)
    return _plus_product(W, task.gains, each, -1)


def dense_factored_step(task: Dense, W: Tensor, delta: Tensor, x: Tensor, lr: Rate) -> Tensor:
    """The same from the factors of G: all (delta A_j)' (x P_j) in one product."""
    g, o, n = W.shape
    left = _product((lr * delta).reshape(g, -1, o), task.gains).view(g, -1, o)
    right = _product(x.reshape(g, -1, n), task.P).view(g, -1, n)
    return _plus_product(W, left.mT, right, -1)


def gradient_step(task: Task, W: Tensor, G: Tensor, lr: Rate, lr_q: Rate) -> Tensor:
    """One step from the gradient G (g, o, n) of the effective weight.

    Momentum filters G first: V = mu V + G in its place, or G + mu V for Nesterov's.
    """
    T = _product(G, task.M)
    if task.gain.dim() == 4:
        T_j = (task.masks.unsqueeze(2) * T.unsqueeze(1)).flatten(1, 2)  # below each other
        S = _product(task.gain.flatten(2), T_j)
    else:
        # C_j' T_j is C' T at the rows and columns of task j, so N sums all tasks in one product.
        S = _product(task.C, task.gain * _product(task.C.mT, T))
    return _plus_product(W - lr * G, lr * T - lr_q * S, task.M.mT)


def factored_step(task: Task, W: Tensor, delta: Tensor, x: Tensor, lr: Rate, lr_q: Rate) -> Tensor:
    """One step of a linear layer from its factors, G = delta' x, without ever forming G.

    delta (b, o) is the gradient of the layer's output, x (b, n) its input, with a column of ones
    where there is a bias.
    """
    slow = lr * delta
    fast = slow if lr_q is lr else lr_q * delta
    left, right = _factors(task, slow, fast, x)
    return _plus_product(W, left.flatten(1, 2).mT, right.flatten(1, 2), -1)


def narrowed_step(P: Tensor, W: Tensor, G: Tensor, lr: Rate) -> Tensor:
    """W - lr G P, for a projector P (g, n, n) that is given whole."""
    return _plus_product(W, lr * G, P, -1)


def narrowed_factored_step(P: Tensor, W: Tensor, delta: Tensor, x: Tensor, lr: Rate) -> Tensor:
    """The same from the factors of G."""
    g, o, n = W.shape
    free = _product(x.reshape(g, -1, n), P)
    return _plus_product(W, (lr * delta).reshape(g, -1, o).mT, free, -1)


def projected_step(M: Tensor, W: Tensor, G: Tensor, lr: Rate) -> Tensor:
    """One step where no old task is trusted: W - lr G (I - M M'), which is GPM's."""
    return _plus_product(W - lr * G, lr * _product(G, M), M.mT)


def projected_factored_step(M: Tensor, W: Tensor, delta: Tensor, x: Tensor, lr: Rate) -> Tensor:
    """The same from the factors of G: it is the inputs that are projected."""
    g, n, _ = M.shape
    delta, x = delta.reshape(g, -1, W.shape[1]), x.reshape(g, -1, n)
    free = _plus_product(x, _product(x, M), M.mT, -1)
    return _plus_product(W, (lr * delta).mT, free, -1)


def no_momentum(W: Tensor) -> Momentum:
    """The momentum before the first step."""
    return Momentum(torch.zeros_like(W), torch.zeros_like(W))


def factored_momentum(task: Task, V: Momentum, delta: Tensor, x: Tensor, mu: float) -> Momentum:
    """V = mu V + G, filtered part by part from the factors of G."""
    left, right = _factors(task, delta, delta, x)
    scaled = left[:, :, 1:].flatten(1, 2), right[:, :, 1:].flatten(1, 2)
    return Momentum(
        torch.baddbmm(V.free, left[:, :, 0].mT, right[:, :, 0], beta=mu),
        torch.baddbmm(V.scaled, scaled[0].mT, scaled[1], beta=mu),
    )


def nesterov(before: Momentum, V: Momentum, mu: float) -> Momentum:
    """G + mu V, written without G: V = mu before + G makes it V + mu (V - before)."""
    return Momentum(*(old.lerp(new, 1 + mu) for old, new in zip(before, V, strict=True)))


def momentum_step(W: Tensor, V: Momentum, lr: Rate, lr_q: Rate) -> Tensor:
    """One step along the filtered gradient of the factored form."""
    return W - lr * V.free - lr_q * V.scaled


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
    """As `costs`, for whole matrices."""
    gradient = b * o * n + (1 + K) * o * n * (n + o)
    factored = (1 + K) * b * (n * n + o * o + o * n)
    return {"gradient": g * gradient, "factored": g * factored}


def _factors(task: Task, slow: Tensor, fast: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """left (g, b, 1 + K, o) and right (g, b, 1 + K, n); of 1 + K the free part is first.

    With z = x M, delta' (x - z M') = G (I - M M') and (delta A_j)' (z_j M') = A_j T_j M': the whole
    update is left' right, a product of the size of a weight gradient. `slow` is delta times what G
    is to be multiplied by, `fast` times what the A_j T_j are.
    """
    g, n, _ = task.M.shape
    o, K = task.C.shape[1], task.signs.shape[1] - 1
    slow, fast, x = slow.reshape(g, -1, o), fast.reshape(g, -1, o), x.reshape(g, -1, n)
    z = _product(x, task.M)
    if task.gain.dim() == 4:
        scaled = _product(fast, task.gain.flatten(2))
    else:
        each = _product(fast, task.C).unsqueeze(2) * task.masks.unsqueeze(1)
        scaled = _product(each.flatten(1, 2), task.C.mT)
    b = slow.shape[1]
    left = torch.cat([slow.unsqueeze(2), scaled.view(g, b, K, o)], 2)
    each = z.unsqueeze(2) * task.signs.unsqueeze(1)
    right = _product(each.flatten(1, 2), task.M.mT).view(g, b, 1 + K, n)
    right[:, :, 0] += x
    return left, right


def _product(A: Tensor, B: Tensor) -> Tensor:
    """A B of every group; of one alone as plain matrices, for which GPUs have better kernels."""
    return (A[0] @ B[0]).unsqueeze(0) if len(A) == 1 else A @ B


def _plus_product(X: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> Tensor:
    """X + alpha A B."""
    if len(A) > 1:
        return torch.baddbmm(X, A, B, alpha=alpha)
    one = X[0], A[0], B[0]
    if is_batchedtensor(one[0]):
        stacked: Tensor = _StackedProduct.apply(*one, alpha)  # type: ignore[no-untyped-call]
        return stacked.unsqueeze(0)
    return torch.addmm(*one, alpha=alpha).unsqueeze(0)


class _StackedProduct(torch.autograd.Function):
    """X + alpha A B of runs stacked by vmap, whose own rule takes three kernels for it, not one."""

    @staticmethod
    def forward(X: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
        raise NotImplementedError("Only called under vmap, which does not come here.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch asks for it where there is a rule for vmap."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, X: Tensor, A: Tensor, B: Tensor, alpha: float) -> Any:
        return torch.baddbmm(*runs_first(info, in_dims, X, A, B), alpha=alpha), 0
