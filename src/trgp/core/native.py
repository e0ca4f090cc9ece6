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

Shapes: W (g, o, n), M (g, n, m), K selected old tasks. A zero column of M contributes nothing, so
groups, and runs batched by vmap, may be padded to one m. What is called in every step depends on
shapes alone: it runs eagerly, under vmap and inside a CUDA graph, and lr and lr_q may be tensors.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .subspace import columns_of

Form = Literal["gradient", "factored"]
Rate = float | Tensor


class Task(NamedTuple):
    """What stays constant in a layer while a task is learnt."""

    M: Tensor  # (g, n, m)
    C: Tensor  # (g, o, m) = W M
    masks: Tensor  # (g, K, m), 1 at the columns of M that make B_j
    gain: Tensor  # A_j (g, K, o, o), or N (g, m, m): how many B_j hold both of two columns


class State(NamedTuple):
    """What a step changes. A snapshot is this tuple, with the momentum where there is one."""

    W: Tensor  # (g, o, n), the effective weight
    Tsum: Tensor  # (g, o, m), the sum of lr_q T over all steps: all that Q depends on


class Momentum(NamedTuple):
    """The filtered gradient in the factored form, split where lr and lr_q part ways."""

    free: Tensor  # (g, o, n), of G (I - M M')
    scaled: Tensor  # (g, o, n), of S M'
    T: Tensor  # (g, o, m)


def begin(W: Tensor, M: Tensor, masks: Sequence[Tensor], form: Form) -> tuple[Task, State]:
    """The constants and the first state of a task that starts at the shared weight W.

    `masks` are those of the selected old tasks, (g, m) or narrower where M has grown since.
    """
    g, o, _ = W.shape
    m = M.shape[2]
    C = W @ M
    wide = [pad(mask, (0, m - mask.shape[1])).to(W.dtype) for mask in masks]
    chosen = torch.stack(wide, 1) if wide else W.new_zeros(g, 0, m)
    outer, inner = gain_costs(form, 1, len(masks), o, m)
    if outer <= inner:
        C_j = C.unsqueeze(1) * chosen.unsqueeze(2)
        gain = C_j @ C_j.mT
    else:
        gain = chosen.mT @ chosen
    return Task(M, C, chosen, gain), State(W, torch.zeros_like(C))


def gradient_step(task: Task, state: State, G: Tensor, lr: Rate, lr_q: Rate) -> State:
    """One step from the gradient G (g, o, n) of the effective weight.

    Momentum filters G first: V = mu V + G in its place, or G + mu V for Nesterov's.
    """
    T = G @ task.M
    if task.gain.dim() == 4:
        S = task.gain.flatten(1, 2).mT @ _per_task(task, T)
    else:
        # C_j' T_j is C' T at the rows and columns of task j, so N sums all tasks in one product.
        S = task.C @ (task.gain * (task.C.mT @ T))
    W = torch.baddbmm(state.W - lr * G, lr * T - lr_q * S, task.M.mT)
    return State(W, state.Tsum + lr_q * T)


def factored_step(
    task: Task, state: State, delta: Tensor, x: Tensor, lr: Rate, lr_q: Rate
) -> State:
    """One step of a linear layer from its factors, G = delta' x, without ever forming G.

    delta (b, o) is the gradient of the layer's output, x (b, n) its input, with a column of ones
    where there is a bias.
    """
    left, right, z = _factors(task, delta, x)
    b = z.shape[1]
    left = torch.cat([lr * left[:, :b], lr_q * left[:, b:]], 1)
    W = torch.baddbmm(state.W, left.mT, right, alpha=-1)
    Tsum = torch.baddbmm(state.Tsum, lr_q * delta.reshape(len(z), b, -1).mT, z)
    return State(W, Tsum)


def projected_step(M: Tensor, W: Tensor, G: Tensor, lr: Rate) -> Tensor:
    """One step where no old task is trusted: W - lr G (I - M M'), which is GPM's."""
    return torch.baddbmm(W - lr * G, lr * (G @ M), M.mT)


def projected_factored_step(M: Tensor, W: Tensor, delta: Tensor, x: Tensor, lr: Rate) -> Tensor:
    """The same from the factors of G: it is the inputs that are projected."""
    g, n, _ = M.shape
    delta, x = delta.reshape(g, -1, W.shape[1]), x.reshape(g, -1, n)
    free = torch.baddbmm(x, x @ M, M.mT, alpha=-1)
    return torch.baddbmm(W, (lr * delta).mT, free, alpha=-1)


def no_momentum(state: State) -> Momentum:
    """The momentum before the first step."""
    return Momentum(*(torch.zeros_like(s) for s in (state.W, state.W, state.Tsum)))


def factored_momentum(task: Task, V: Momentum, delta: Tensor, x: Tensor, mu: float) -> Momentum:
    """V = mu V + G, filtered part by part from the factors of G."""
    left, right, z = _factors(task, delta, x)
    b = z.shape[1]
    return Momentum(
        torch.baddbmm(V.free, left[:, :b].mT, right[:, :b], beta=mu),
        torch.baddbmm(V.scaled, left[:, b:].mT, right[:, b:], beta=mu),
        torch.baddbmm(V.T, left[:, :b].mT, z, beta=mu),
    )


def nesterov(before: Momentum, V: Momentum, mu: float) -> Momentum:
    """G + mu V, written without G: V = mu before + G makes it V + mu (V - before)."""
    return Momentum(*(old.lerp(new, 1 + mu) for old, new in zip(before, V, strict=True)))


def momentum_step(state: State, V: Momentum, lr: Rate, lr_q: Rate) -> State:
    """One step along the filtered gradient of the factored form."""
    return State(state.W - lr * V.free - lr_q * V.scaled, state.Tsum + lr_q * V.T)


def scalings(task: Task, Tsum: Tensor) -> list[Tensor]:
    """S_j = Q_j - I = -C_j' Tsum_j (g, r_j, r_j) of the selected old tasks.

    The shared weight needs none of them: it is `guard.with_coordinates(W_eff, M, C)`.
    """
    masks = [mask > 0 for mask in task.masks.unbind(1)]
    return [-columns_of(task.C, mask).mT @ columns_of(Tsum, mask) for mask in masks]


def costs(b: int, K: int, g: int, o: int, n: int, m: int) -> dict[Form, int]:
    """Multiplications of one step of a linear layer at batch b, from (delta, x) to the weight."""
    gradient = b * o * n + 2 * o * n * m + min(gain_costs("gradient", b, K, o, m))
    factored = b * m * (n + o) + (1 + K) * b * n * (m + o) + min(gain_costs("factored", b, K, o, m))
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


def _factors(task: Task, delta: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """left (g, (1+K) b, o), right (g, (1+K) b, n) and z = x M, free part first, then task by task.

    delta' (x - z M') = G (I - M M') and (delta A_j)' (z_j M') = A_j T_j M': the whole update is
    left' right, a product of the size of a weight gradient.
    """
    g, n, _ = task.M.shape
    delta = delta.reshape(g, -1, task.C.shape[1])
    x = x.reshape(g, -1, n)
    z = x @ task.M
    if task.gain.dim() == 4:
        scaled = (delta.unsqueeze(1) @ task.gain).flatten(1, 2)
    else:
        scaled = _per_task(task, delta @ task.C) @ task.C.mT
    left = torch.cat([delta, scaled], 1)
    right = torch.cat([-z, _per_task(task, z)], 1) @ task.M.mT
    right[:, : x.shape[1]] += x
    return left, right, z


def _per_task(task: Task, X: Tensor) -> Tensor:
    """X_1, ..., X_K below each other: (g, k, m) becomes (g, K k, m)."""
    return (task.masks.unsqueeze(2) * X.unsqueeze(1)).flatten(1, 2)
