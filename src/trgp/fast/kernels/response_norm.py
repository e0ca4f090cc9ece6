"""Local response norm of channels-last maps: one kernel forward, one backward.

The window of channel c reaches from c - size // 2 to c + (size - 1) // 2, with zeros outside:

    d[c] = k + alpha / size sum over c' in the window of c of x[c']^2
    y[c] = x[c] d[c]^-beta
    dx[c] = dy[c] d[c]^-beta - 2 alpha beta / size x[c] s[c]
    s[c] = sum over c' whose window contains c of dy[c'] x[c'] d[c']^(-beta - 1)

Backward, d is recomputed from x, which is stored anyway. Every number gathers its own sum: the same
input gives the same bits every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# One number per thread: a warp then also reads a neighbouring channel as one stretch. With four per
# thread these reads would be as many, and each scattered over four times the memory.
BLOCK = 128


def response_norm(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """F.local_response_norm(x, size, alpha, beta, k) of (N, C, H, W), channels last, for k > 0."""
    y: Tensor = _normalised(x, size, alpha, beta, k)
    return y


@torch.library.custom_op("trgp::response_norm", mutates_args=())
def _normalised(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    y = _like(x)
    with torch.cuda.device_of(x):
        _normalise[_grid(x)](x, y, x.numel(), x.shape[1], size, alpha, beta, k, BLOCK)
    return y


@_normalised.register_fake
def _(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    return _like(x)


@torch.library.custom_op("trgp::response_norm_backward", mutates_args=())
def _gradient(dy: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """Return dx."""
    dy, x = (t.contiguous(memory_format=torch.channels_last) for t in (dy, x))
    dx = _like(x)
    with torch.cuda.device_of(x):
        _input_gradient[_grid(x)](dy, x, dx, x.numel(), x.shape[1], size, alpha, beta, k, BLOCK)
    return dx


@_gradient.register_fake
def _(dy: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    return _like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.constants = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
    (x,) = ctx.saved_tensors
    dx: Tensor = _gradient(dy, x, *ctx.constants)
    return dx, None, None, None, None


_normalised.register_autograd(_backward, setup_context=_remember)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


@triton.jit
def _beside(
    x: tl.tensor, i: tl.tensor, count: tl.tensor, AWAY: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Load the number AWAY channels off, at the same place."""
    c = i % C + AWAY
    return tl.load(x + i + AWAY, mask=(i < count) & (c >= 0) & (c < C), other=0.0)


@triton.jit
def _denominator(
    x: tl.tensor,
    i: tl.tensor,
    count: tl.tensor,
    AWAY: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    ALPHA: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """Compute d of the channel AWAY channels off."""
    squares = tl.zeros(i.shape, tl.float32)
    for j in tl.static_range(SIZE):
        value = _beside(x, i, count, AWAY + j - SIZE // 2, C)
        squares += value * value
    return K + ALPHA / SIZE * squares


@triton.jit
def _powers(d: tl.tensor, BETA: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Compute d^-beta and d^(-beta - 1)."""
    if BETA == 0.75:  # as in most networks: roots need far fewer instructions
        root = tl.rsqrt(d)
        one = root * tl.sqrt(root)
        two = one * (root * root)
    else:
        log = tl.log2(d)
        one = tl.exp2(log * -BETA)
        two = tl.exp2(log * (-BETA - 1))
    return one, two


@triton.jit
def _normalise(
    x: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = _denominator(x, i, count, 0, C, SIZE, ALPHA, K)
    power, _ = _powers(d, BETA)
    tl.store(y + i, _beside(x, i, count, 0, C) * power, mask=i < count)


@triton.jit
def _input_gradient(
    dy: tl.tensor,
    x: tl.tensor,
    dx: tl.tensor,
    count: tl.tensor,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    along = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(SIZE):
        # This channel is the j-th in the window of the channel `away` off.
        away = SIZE // 2 - j
        d = _denominator(x, i, count, away, C, SIZE, ALPHA, K)
        _, power = _powers(d, BETA)
        along += _beside(dy, i, count, away, C) * _beside(x, i, count, away, C) * power
    d = _denominator(x, i, count, 0, C, SIZE, ALPHA, K)
    power, _ = _powers(d, BETA)
    own = _beside(dy, i, count, 0, C) * power
    along = 2 * ALPHA * BETA / SIZE * _beside(x, i, count, 0, C) * along
    tl.store(dx + i, own - along, mask=i < count)
