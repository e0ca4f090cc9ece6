"""BatchNorm with the statistics of the current batch: two kernels forward, two backward.

Channels-last maps are rows of C numbers each, like samples of C features. Over the rows

    xhat = (x - mean) rstd, rstd = 1 / sqrt(var + eps), var with 1/n
    y = weight xhat + bias
    dx = weight rstd (dy - mean(dy) - xhat mean(dy xhat))
    dweight = sum(dy xhat), dbias = sum(dy)

The operations that follow in a network are fused: `plus` is added to y, a ReLU makes it max(y, 0),
and dropout keeps some numbers and divides them by the share it keeps. Backward, y is recomputed
rather than read, to find where it was above 0.

The first kernel of a pass sums a part of the rows in every program; in the second, every program
adds up the parts of its own channels. There are no atomic sums: the same input gives the same bits
every time.
"""

from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # about two per processor of a large GPU
TILE = (64, 32)  # rows and channels per program of a second kernel at once
NARROW = 16  # channels per program of a first kernel: twice the programs for as many parts
PARTS = 128  # upper bound: every program of a second kernel reads all parts


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool = False,
    plus: Tensor | None = None,
    keep: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """F.batch_norm(x, None, None, weight, bias, True, eps=eps), of channels-last maps.

    Args:
        plus: added to y; has the shape of x.
        keep: 1 where dropout keeps a number; has the shape of x.
        share: the share of numbers that dropout keeps.
    """
    y: Tensor = _normalised(x, weight, bias, eps, relu, plus, keep, share)[0]
    return y


@torch.library.custom_op("trgp::batch_norm", mutates_args=())
def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    plus: Tensor | None,
    keep: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y of x (N, C) or (N, C, H, W), and the mean and rstd of every channel."""
    x, plus, keep = _in_rows(x), _in_rows(plus), _in_rows(keep)
    weight, bias = _dense(weight), _dense(bias)
    c = x.shape[1]
    rows = x.numel() // c
    parts, tall = _parts(rows, c)
    sums = x.new_empty(parts, 2, c)
    y, mean, rstd = _outputs(x)
    with torch.cuda.device_of(x):
        _sums[parts, triton.cdiv(c, NARROW)](x, sums, rows, c, parts, tall, NARROW)
        _normalise[_grid(rows, c)](
            x,
            weight,
            bias,
            plus,
            keep,
            sums,
            y,
            mean,
            rstd,
            rows,
            eps,
            share,
            c,
            relu,
            parts,
            *TILE,
        )
    return y, mean, rstd


@_normalised.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    plus: Tensor | None,
    keep: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x)


@torch.library.custom_op("trgp::batch_norm_backward", mutates_args=())
def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    relu: bool,
    plus: Tensor | None,
    keep: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dweight, dbias and dplus, which is empty if nothing was added."""
    dy, x, plus, keep = _in_rows(dy), _in_rows(x), _in_rows(plus), _in_rows(keep)
    weight, bias = _dense(weight), _dense(bias)
    c = x.shape[1]
    rows = x.numel() // c
    parts, tall = _parts(rows, c)
    sums = x.new_empty(parts, 2, c)
    dx, dweight, dbias = _outputs(x)
    dplus = _like(plus, x)
    given = dy, x, weight, bias, plus, keep, mean, rstd, sums
    with torch.cuda.device_of(x):
        _gradient_sums[parts, triton.cdiv(c, NARROW)](
            *given, rows, share, c, relu, parts, tall, NARROW
        )
        _input_gradient[_grid(rows, c)](
            *given, dx, dweight, dbias, dplus, rows, share, c, relu, parts, *TILE
        )
    return dx, dweight, dbias, dplus


@_gradients.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    relu: bool,
    plus: Tensor | None,
    keep: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_outputs(x), _like(plus, x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.relu, plus, keep, ctx.share = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd, plus, keep)
    # Otherwise zeros would be written as their gradients.
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd, plus, keep = ctx.saved_tensors
    dx, dweight, dbias, dplus = _gradients(
        dy, x, weight, bias, mean, rstd, ctx.relu, plus, keep, ctx.share
    )
    own = None if weight is None else dweight, None if bias is None else dbias
    return dx, *own, None, None, None if plus is None else dplus, None, None


_normalised.register_autograd(_backward, setup_context=_remember)


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


@overload
def _in_rows(x: Tensor) -> Tensor: ...
@overload
def _in_rows(x: Tensor | None) -> Tensor | None: ...
def _in_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous(memory_format=_layout(x))


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate rows like those of x, and twice one number per channel."""
    c = x.shape[1]
    return torch.empty_like(x, memory_format=_layout(x)), x.new_empty(c), x.new_empty(c)


def _like(plus: Tensor | None, x: Tensor) -> Tensor:
    """Allocate the gradient of an addition; it is empty if there is none."""
    return x.new_empty(0) if plus is None else torch.empty_like(x, memory_format=_layout(x))


def _parts(rows: int, c: int) -> tuple[int, int]:
    """Return the number of parts of the rows, a power of two, and the rows read at once."""
    most = max(1, min(PARTS, 2 * PROGRAMS // triton.cdiv(c, NARROW), rows // 64))
    parts = 1 << (most.bit_length() - 1)
    return parts, 256 if rows >= 512 * parts else 64


def _grid(rows: int, c: int) -> tuple[int, int]:
    """Return a second kernel's grid; with more tiles than programs, programs take turns."""
    tall, wide = TILE
    across = triton.cdiv(c, wide)
    return min(triton.cdiv(rows, tall), triton.cdiv(PROGRAMS, across)), across


@triton.jit
def _read(
    x: tl.tensor,
    r: tl.tensor,
    c: tl.tensor,
    rows: tl.tensor,
    other: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    inside = (r < rows)[:, None] & (c < C)[None, :]
    return tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=other)


@triton.jit
def _affine(
    weight: tl.tensor,
    bias: tl.tensor,
    rstd: tl.tensor,
    c: tl.tensor,
    C: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Scale and shift of a channel: y = (x - mean) scale + shift."""
    scale = rstd
    if weight is not None:
        scale = rstd * tl.load(weight + c, mask=c < C, other=0.0)
    shift = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + c, mask=c < C, other=0.0)
    return scale, shift


@triton.jit
def _near(x: tl.tensor, c: tl.tensor, rows: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Mean of the first rows; a single row may be an outlier, far from all others."""
    some = _read(x, tl.arange(0, 64), c, rows, 0.0, C)
    return tl.sum(some, 0) / tl.minimum(rows, 64)


@triton.jit
def _sums(
    x: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Sum d and d^2, where d = x - near is small enough to keep the variance."""
    part = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    near = _near(x, c, rows, C)[None, :]
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, PARTS * ROWS):
        d = _read(x, start + tl.arange(0, ROWS), c, rows, near, C) - near
        one += d
        two += d * d
    tl.store(sums + part * 2 * C + c, tl.sum(one, 0), mask=c < C)
    tl.store(sums + part * 2 * C + C + c, tl.sum(two, 0), mask=c < C)


@triton.jit
def _normalise(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    plus: tl.tensor,
    keep: tl.tensor,
    sums: tl.tensor,
    y: tl.tensor,
    means: tl.tensor,
    rstds: tl.tensor,
    rows: tl.tensor,
    EPS: tl.constexpr,
    SHARE: tl.constexpr,
    C: tl.constexpr,
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = c < C
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value = _read(x, r, c, rows, 0.0, C)  # loads while the parts are summed
    at = sums + tl.arange(0, PARTS)[:, None] * (2 * C) + c[None, :]
    one = tl.sum(tl.load(at, mask=known[None, :], other=0.0), 0) / rows
    two = tl.sum(tl.load(at + C, mask=known[None, :], other=0.0), 0) / rows
    mean = _near(x, c, rows, C) + one
    # NaN stays NaN, so that a divergence stays visible.
    variance = tl.maximum(two - one * one, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = tl.rsqrt(variance + EPS)
    if tl.program_id(0) == 0:
        tl.store(means + c, mean, mask=known)
        tl.store(rstds + c, rstd, mask=known)
    scale, shift = _affine(weight, bias, rstd, c, C, CHANNELS)
    step = tl.num_programs(0) * ROWS
    for start in range(tl.program_id(0) * ROWS, rows, step):
        r = start + tl.arange(0, ROWS)
        found = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if plus is not None:
            found += _read(plus, r, c, rows, 0.0, C)
        if RELU:
            found = tl.where(found <= 0.0, 0.0, found)
        if keep is not None:
            found = tl.where(_read(keep, r, c, rows, 0, C) != 0, found / SHARE, 0.0)
        value = _read(x, r + step, c, rows, 0.0, C)
        inside = (r < rows)[:, None] & known[None, :]
        tl.store(y + r[:, None] * C + c[None, :], found, mask=inside)


@triton.jit
def _through(
    g: tl.tensor,
    d: tl.tensor,
    r: tl.tensor,
    c: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    plus: tl.tensor,
    keep: tl.tensor,
    rows: tl.tensor,
    SHARE: tl.constexpr,
    C: tl.constexpr,
    RELU: tl.constexpr,
) -> tl.tensor:
    """Propagate a gradient g back through the steps after the norm; d is x - mean."""
    if keep is not None:
        g = tl.where(_read(keep, r, c, rows, 0, C) != 0, g / SHARE, 0.0)
    if RELU:
        y = d * scale[None, :] + shift[None, :]
        if plus is not None:
            y += _read(plus, r, c, rows, 0.0, C)
        g = tl.where(y <= 0.0, 0.0, g)
    return g


@triton.jit
def _gradient_sums(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    plus: tl.tensor,
    keep: tl.tensor,
    means: tl.tensor,
    rstds: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    SHARE: tl.constexpr,
    C: tl.constexpr,
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Sum dy and dy xhat."""
    part = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mean = tl.load(means + c, mask=c < C, other=0.0)
    rstd = tl.load(rstds + c, mask=c < C, other=0.0)
    scale, shift = _affine(weight, bias, rstd, c, C, CHANNELS)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, PARTS * ROWS):
        r = start + tl.arange(0, ROWS)
        g = _read(dy, r, c, rows, 0.0, C)
        d = _read(x, r, c, rows, 0.0, C) - mean[None, :]
        g = _through(g, d, r, c, scale, shift, plus, keep, rows, SHARE, C, RELU)
        one += g
        two += g * d
    tl.store(sums + part * 2 * C + c, tl.sum(one, 0), mask=c < C)
    tl.store(sums + part * 2 * C + C + c, tl.sum(two, 0) * rstd, mask=c < C)


@triton.jit
def _input_gradient(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    plus: tl.tensor,
    keep: tl.tensor,
    means: tl.tensor,
    rstds: tl.tensor,
    sums: tl.tensor,
    dx: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    dplus: tl.tensor,
    rows: tl.tensor,
    SHARE: tl.constexpr,
    C: tl.constexpr,
    RELU: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = c < C
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = _read(dy, r, c, rows, 0.0, C)  # load while the parts are summed
    value = _read(x, r, c, rows, 0.0, C)
    at = sums + tl.arange(0, PARTS)[:, None] * (2 * C) + c[None, :]
    one = tl.sum(tl.load(at, mask=known[None, :], other=0.0), 0)
    two = tl.sum(tl.load(at + C, mask=known[None, :], other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(dbias + c, one, mask=known)
        tl.store(dweight + c, two, mask=known)
    mean = tl.load(means + c, mask=known, other=0.0)
    rstd = tl.load(rstds + c, mask=known, other=0.0)
    scale, shift = _affine(weight, bias, rstd, c, C, CHANNELS)
    level = one / rows
    slope = rstd * two / rows
    step = tl.num_programs(0) * ROWS
    for start in range(tl.program_id(0) * ROWS, rows, step):
        r = start + tl.arange(0, ROWS)
        d = value - mean[None, :]
        g = _through(g, d, r, c, scale, shift, plus, keep, rows, SHARE, C, RELU)
        place = r[:, None] * C + c[None, :]
        inside = (r < rows)[:, None] & known[None, :]
        if plus is not None:
            tl.store(dplus + place, g, mask=inside)
        found = (g - level[None, :] - d * slope[None, :]) * scale[None, :]
        g = _read(dy, r + step, c, rows, 0.0, C)
        value = _read(x, r + step, c, rows, 0.0, C)
        tl.store(dx + place, found, mask=inside)
