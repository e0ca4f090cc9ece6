"""Convolutions of small maps as one product each, y = R' w', without storing R.

Maps are channels last: a patch is then a few runs of adjacent numbers. With M = N OH OW places
and K = KH KW C inputs of a kernel, the three products are

    y (M x O)  = R' (M x K) w' (K x O)
    dw (O x K) = dy' (O x M) R' (M x K), in parts of M that are summed afterwards, in order
    dx         = computed as y is, from dy and the kernel turned round

Torch's own library converts maps between two layouts around every call, and has no good kernel for
so few channels. Products are rounded as `torch.backends.cudnn` specifies for convolutions.

Paddings are not constants to the compiler: if it knows that places are small numbers, it computes
two at a time in sixteen bits each, and ptxas 12.8 was seen to lose a term of such a pair.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .parts import add_up
from .windows import sides_after

PROCESSORS = 132  # of a large GPU


class Tiles(NamedTuple):
    """Tile sizes of a product, by trial with eight concurrent products.

    BM and BN are rows and columns of the result, BK is the length of a piece of the sum, and
    num_stages is the number of pieces loading at the same time.
    """

    BM: int
    BN: int
    BK: int
    num_stages: int


def convolution(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding), with a channels-last result."""
    y: Tensor = _convolved(x, weight, list(stride), list(padding))
    return y


@torch.library.custom_op("trgp::convolution", mutates_args=())
def _convolved(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Convolve x (N, C, H, W) with weight (O, C, KH, KW), both in any layout."""
    y = _output(x, weight, stride, padding)
    w = weight.permute(0, 2, 3, 1).contiguous()
    _, o, oh, ow = y.shape
    _, _, kw, c = w.shape
    rows = y.numel() // o
    tiles = _tiles(rows, o, w[0].numel(), pipelined=x.stride(1) == 1)
    with torch.cuda.device_of(x):
        _product[_grid(rows, o, tiles)](
            x, w, y, rows, *padding,
            *x.stride(), c, *x.shape[2:], oh, ow, o, w[0].numel(), kw, *stride,
            **tiles._asdict(), PADDED=any(padding), ROUNDING=_rounding(), num_warps=4,
        )  # fmt: skip
    return y


def _output(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    (n, _, *sides), (o, _, *kernel) = x.shape, weight.shape
    return _maps(n, o, *sides_after(sides, kernel, stride, padding), x)


_convolved.register_fake(_output)


@torch.library.custom_op("trgp::convolution_dx", mutates_args=())
def _input_gradient(
    dy: Tensor, weight: Tensor, sides: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Return dx, for maps with these sides."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    w = weight.permute(1, 2, 3, 0).contiguous()
    dx = _input_like(dy, weight, sides, stride, padding)
    n, c, h, v = dx.shape
    o, _, *kernel = weight.shape
    # Places seen through the same taps form a class: every stride-th place of each side.
    rows = n * triton.cdiv(h, stride[0]) * triton.cdiv(v, stride[1])
    classes = stride[0] * stride[1]
    tiles = _tiles(rows * classes, c, w[0].numel() // classes)
    with torch.cuda.device_of(dy):
        _turned_product[*_grid(rows, c, tiles), classes](
            dy, w, dx, n, *padding,
            c, h, v, *dy.shape[2:], o, *kernel, *stride,
            **tiles._asdict(), ROUNDING=_rounding(), num_warps=4,
        )  # fmt: skip
    return dx


@_input_gradient.register_fake
def _input_like(
    dy: Tensor, weight: Tensor, sides: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    h, v = sides
    return _maps(dy.shape[0], weight.shape[1], h, v, dy)


@torch.library.custom_op("trgp::convolution_dw", mutates_args=())
def _weight_gradient(
    x: Tensor, dy: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    dy = dy.contiguous(memory_format=torch.channels_last)
    dw = _weight_like(x, dy, kernel, stride, padding)
    _, o, oh, ow = dy.shape
    c, k = x.shape[1], dw[0].numel()
    rows = dy.numel() // o
    # Tiles of over 32 rows need another order of numbers, and load them one by one.
    tiles = Tiles(_near(o), _near(k), 64, 1) if k <= 64 else Tiles(min(32, _near(o)), 128, 32, 1)
    blocks, columns = _grid(o, k, tiles)
    pieces = triton.cdiv(rows, tiles.BK)
    # Parts of at least 128 places: writing a part costs as much as computing some places.
    each = max(128 // tiles.BK, triton.cdiv(pieces * blocks * columns, 2 * PROCESSORS))
    each = min(each, pieces)
    count = triton.cdiv(pieces, each)
    parts = dw.new_empty(count, o, k)
    with torch.cuda.device_of(dy):
        _weight_product[(blocks, columns, count)](
            x, dy, parts, rows, each, *padding,
            *x.stride(), c, *x.shape[2:], oh, ow, o, k, kernel[1], *stride,
            **tiles._asdict(), PADDED=any(padding), ROUNDING=_rounding(), num_warps=4,
        )  # fmt: skip
        add_up(parts, dw, c, k // c)
    return dw


@_weight_gradient.register_fake
def _weight_like(
    x: Tensor, dy: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    return dy.new_empty(dy.shape[1], x.shape[1], *kernel)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _input_gradient(dy, weight, list(x.shape[2:]), ctx.stride, ctx.padding)
    if ctx.needs_input_grad[1]:
        dw = _weight_gradient(x, dy, list(weight.shape[2:]), ctx.stride, ctx.padding)
    return dx, dw, None, None


_convolved.register_autograd(_backward, setup_context=_remember)


def _maps(n: int, c: int, h: int, w: int, like: Tensor) -> Tensor:
    """Allocate channels-last maps."""
    return like.new_empty(n, h, w, c).permute(0, 3, 1, 2)


def _tiles(rows: int, columns: int, terms: int, pipelined: bool = True) -> Tiles:
    """Return the tile sizes of a product with patches.

    Args:
        pipelined: whether a patch is runs of adjacent numbers, which can load in large pieces.
    """
    if columns <= 32:
        wide = _near(columns)
        return Tiles(64, wide, 64, 1) if terms > 512 else Tiles(128, wide, 32, 1)
    if columns <= 64:
        return Tiles(128, 64, 32, 3 if pipelined else 1)
    if triton.cdiv(rows, 64) * triton.cdiv(columns, 128) < PROCESSORS // 4:
        return Tiles(64, 64, 64, 3)
    return Tiles(64, 128, 32, 3)


def _near(size: int) -> int:
    """Return the side of a tile that fits a size."""
    return min(64, max(16, triton.next_power_of_2(size)))


def _grid(rows: int, columns: int, tiles: Tiles) -> tuple[int, int]:
    return triton.cdiv(rows, tiles.BM), triton.cdiv(columns, tiles.BN)


def _rounding() -> str:
    cudnn: Any = torch.backends.cudnn
    try:
        allowed = cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read this setting once the newer one was set
        allowed = cudnn.conv.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


@triton.jit(do_not_specialize=["pad_h", "pad_w"])
def _product(
    x, w, y, rows, pad_h, pad_w,
    SN: tl.constexpr, SC: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    OC: tl.constexpr, K: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PADDED: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = _patches(
            x, m, k, rows, pad_h, pad_w,
            SN, SC, SH, SW, C, H, W, OH, OW, K, KW, STRIDE_H, STRIDE_W, PADDED,
        )  # fmt: skip
        there = (o < OC)[:, None] & (k < K)[None, :]
        b = tl.load(w + o[:, None] * K + k[None, :], mask=there, other=0.0)
        total = tl.dot(a, b.T, total, input_precision=ROUNDING)
    kept = (m < rows)[:, None] & (o < OC)[None, :]
    tl.store(y + m[:, None] * OC + o[None, :], total, mask=kept)


@triton.jit(do_not_specialize=["pad_h", "pad_w"])
def _turned_product(
    dy, w, dx, N, pad_h, pad_w,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    OC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Sum over the outputs that see each place; w is (C, KH, KW, O).

    A place is seen through every STRIDE-th tap only. Places seen through the same taps form a
    class: a program has places of one class, and sums over the taps of that class alone.
    """
    HIGH: tl.constexpr = (H + STRIDE_H - 1) // STRIDE_H
    WIDE: tl.constexpr = (W + STRIDE_W - 1) // STRIDE_W
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.program_id(2) // STRIDE_W
    column = tl.program_id(2) % STRIDE_W
    image = m // (HIGH * WIDE)
    down = m // WIDE % HIGH
    across = m % WIDE
    there = (image < N) & (down * STRIDE_H + row < H) & (across * STRIDE_W + column < W)
    # The first tap that sees them, the output that sees them through it, and the number of taps.
    tap_h = (row + pad_h) % STRIDE_H
    tap_w = (column + pad_w) % STRIDE_W
    bottom = down + (row + pad_h) // STRIDE_H
    side = across + (column + pad_w) // STRIDE_W
    high = (KH - tap_h + STRIDE_H - 1) // STRIDE_H
    wide = (KW - tap_w + STRIDE_W - 1) // STRIDE_W
    terms = high * wide * OC
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, terms, BK):
        k = start + tl.arange(0, BK)
        tap = k // OC
        i = tap // tl.maximum(wide, 1)  # a class that no tap sees is started too
        j = tap % tl.maximum(wide, 1)
        h = bottom[:, None] - i[None, :]
        v = side[:, None] - j[None, :]
        seen = (h >= 0) & (h < OH) & (v >= 0) & (v < OW)
        at = image[:, None] * (OH * OW * OC) + (h * OW + v) * OC + (k % OC)[None, :]
        known = (k < terms)[None, :]
        a = tl.load(dy + at, mask=there[:, None] & known & seen, other=0.0)
        place = ((tap_h + i * STRIDE_H) * KW + tap_w + j * STRIDE_W) * OC + k % OC
        b = tl.load(
            w + c[:, None] * (KH * KW * OC) + place[None, :],
            mask=(c < C)[:, None] & known,
            other=0.0,
        )
        total = tl.dot(a, b.T, total, input_precision=ROUNDING)
    at = (image * H + down * STRIDE_H + row) * W + across * STRIDE_W + column
    kept = there[:, None] & (c < C)[None, :]
    tl.store(dx + at[:, None] * C + c[None, :], total, mask=kept)


@triton.jit(do_not_specialize=["pad_h", "pad_w"])
def _weight_product(
    x, dy, parts, rows, each, pad_h, pad_w,
    SN: tl.constexpr, SC: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    OC: tl.constexpr, K: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PADDED: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Compute one part of the sum over the places: `each` pieces of BK."""
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    total = tl.zeros((BM, BN), tl.float32)
    for piece in range(part * each, part * each + each):
        m = piece * BK + tl.arange(0, BK)
        a = _patches(
            x, m, k, rows, pad_h, pad_w,
            SN, SC, SH, SW, C, H, W, OH, OW, K, KW, STRIDE_H, STRIDE_W, PADDED,
        )  # fmt: skip
        there = (m < rows)[:, None] & (o < OC)[None, :]
        # Masked after the load: the unit needs the numbers transposed, and a load for the unit
        # alone would follow that order, one number at a time.
        g = tl.where(there, tl.load(dy + m[:, None] * OC + o[None, :], mask=there), 0.0)
        total = tl.dot(g.T, a, total, input_precision=ROUNDING)
    kept = (o < OC)[:, None] & (k < K)[None, :]
    tl.store(parts + part * (OC * K) + o[:, None] * K + k[None, :], total, mask=kept)


@triton.jit
def _patches(
    x, m, k, rows, pad_h, pad_w,
    SN: tl.constexpr, SC: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    K: tl.constexpr, KW: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Gather the rows m and columns k of R' from the maps."""
    place = m % (OH * OW)
    top = (place // OW) * STRIDE_H - pad_h
    left = (place % OW) * STRIDE_W - pad_w
    tap = k // C
    down = tap // KW
    right = tap % KW
    inside = (m < rows)[:, None] & (k < K)[None, :]
    if PADDED:
        h = top[:, None] + down[None, :]
        w = left[:, None] + right[None, :]
        inside = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    start = (m // (OH * OW)) * SN + top * SH + left * SW
    along = down * SH + right * SW + (k % C) * SC
    return tl.load(x + start[:, None] + along[None, :], mask=inside, other=0.0)
