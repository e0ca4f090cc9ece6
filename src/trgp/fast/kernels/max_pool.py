"""Max pooling of channels-last maps.

Forward, every window o stores which of its places won, counted row by row. Backward, every place p
of the input gathers from the windows that contain it,

    dx[p] = sum over o around p, where p won o, of dy[o]

so that no two programs add to one number: the same input gives the same bits every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .windows import sides_after

BLOCK = 512  # four adjacent channels per thread: as many as one read fetches


def max_pool2d(
    x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """F.max_pool2d(x, kernel, stride, padding), channels last, for kernels of up to 127 places."""
    y: Tensor = _pooled(x, list(kernel), list(stride), list(padding))[0]
    return y


@torch.library.custom_op("trgp::max_pool2d", mutates_args=())
def _pooled(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    """Return y, and the winning place in each window."""
    x = x.contiguous(memory_format=torch.channels_last)
    y, winners = outputs = _outputs(x, kernel, stride, padding)
    _, c, h, w = x.shape
    grid = (triton.cdiv(y.numel(), BLOCK),)
    with torch.cuda.device_of(x):
        _pool[grid](
            x, y, winners, y.numel(), *padding, c, h, w, *y.shape[2:], *kernel, *stride, BLOCK
        )
    return outputs


def _outputs(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    n, c, *sides = x.shape
    h, w = sides_after(sides, kernel, stride, padding)
    y, winners = (
        torch.empty((n, c, h, w), dtype=t, device=x.device, memory_format=torch.channels_last)
        for t in (x.dtype, torch.int8)
    )
    return y, winners


_pooled.register_fake(_outputs)


@torch.library.custom_op("trgp::max_pool2d_backward", mutates_args=())
def _gradient(
    dy: Tensor,
    winners: Tensor,
    sides: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> Tensor:
    """Return dx, for maps with these sides."""
    dy, winners = (t.contiguous(memory_format=torch.channels_last) for t in (dy, winners))
    dx = _input_like(dy, winners, sides, kernel, stride, padding)
    c, *outs = dy.shape[1:]
    grid = (triton.cdiv(dx.numel(), BLOCK),)
    with torch.cuda.device_of(dy):
        _gather[grid](
            dy, winners, dx, dx.numel(), *padding, c, *sides, *outs, *kernel, *stride, BLOCK
        )
    return dx


def _input_like(
    dy: Tensor,
    winners: Tensor,
    sides: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> Tensor:
    return torch.empty(
        (*dy.shape[:2], *sides),
        dtype=dy.dtype,
        device=dy.device,
        memory_format=torch.channels_last,
    )


_gradient.register_fake(_input_like)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.kernel, ctx.stride, ctx.padding = inputs
    ctx.sides = list(x.shape[2:])
    _, winners = output
    ctx.save_for_backward(winners)
    # Otherwise zeros would be written as its gradient.
    ctx.mark_non_differentiable(winners)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, None, None, None]:
    (winners,) = ctx.saved_tensors
    dx: Tensor = _gradient(dy, winners, ctx.sides, ctx.kernel, ctx.stride, ctx.padding)
    return dx, None, None, None


_pooled.register_autograd(_backward, setup_context=_remember)


# The padding is an argument rather than a constant: if LLVM knows how small h and w are, it packs
# both into one register, and ptxas 12.8 has been seen to lose a subtraction of such a pair.
@triton.jit(do_not_specialize=["pad_h", "pad_w"])
def _pool(
    x: tl.tensor,
    y: tl.tensor,
    winners: tl.tensor,
    count: tl.tensor,
    pad_h: tl.tensor,
    pad_w: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Pool as torch does: the first of equal numbers wins, and NaN wins over all numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = i // C
    top = (place // OW) % OH * STRIDE_H - pad_h
    left = place % OW * STRIDE_W - pad_w
    image = x + place // (OH * OW) * (H * W * C) + i % C
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    # The first place within the map, for windows that contain only -inf.
    winner = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
    for down in tl.static_range(KH):
        for right in tl.static_range(KW):
            h = top + down
            w = left + right
            inside = (i < count) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(image + (h * W + w) * C, mask=inside, other=float("-inf"))
            wins = (value > best) | (value != value)
            best = tl.where(wins, value, best)
            winner = tl.where(wins, down * KW + right, winner)
    tl.store(y + i, best, mask=i < count)
    tl.store(winners + i, winner.to(tl.int8), mask=i < count)


@triton.jit(do_not_specialize=["pad_h", "pad_w"])
def _gather(
    dy: tl.tensor,
    winners: tl.tensor,
    dx: tl.tensor,
    count: tl.tensor,
    pad_h: tl.tensor,
    pad_w: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = i // C
    h = (place // W) % H + pad_h
    w = place % W + pad_w
    # The last window that begins at or before the place, and the place within it. Windows before it
    # that still contain the place are at fixed distances.
    oh = h // STRIDE_H
    ow = w // STRIDE_W
    down = h - oh * STRIDE_H
    right = w - ow * STRIDE_W
    at = place // (H * W) * (OH * OW * C) + (oh * OW + ow) * C + i % C
    here = down * KW + right
    total = tl.zeros((BLOCK,), tl.float32)
    for up in tl.static_range((KH + STRIDE_H - 1) // STRIDE_H):
        for back in tl.static_range((KW + STRIDE_W - 1) // STRIDE_W):
            inside = (i < count) & (down < KH - up * STRIDE_H) & (right < KW - back * STRIDE_W)
            inside = inside & (oh >= up) & (oh < OH + up) & (ow >= back) & (ow < OW + back)
            window = at - (up * OW + back) * C
            winner = tl.load(winners + window, mask=inside, other=-1)
            gradient = tl.load(dy + window, mask=inside, other=0.0)
            won = winner == here + (up * STRIDE_H * KW + back * STRIDE_W)
            total += tl.where(won, gradient, 0.0)
    tl.store(dx + i, total, mask=i < count)
