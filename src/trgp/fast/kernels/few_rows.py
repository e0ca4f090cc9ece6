"""Products of a few rows with a matrix, y = a b, in full float32 on units that round to TF32.

Each number is split into two TF32 numbers, and of the four products of such halves the three that
matter are summed: this is as accurate as float32 arithmetic, and faster. Torch's library has no
kernel for so few rows that fills a GPU; here the sum over K is cut into parts, which are added in
order. Products that are computed together do not depend on each other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .parts import add_up
from .reach import MOST, reach

ROWS = 192  # upper bound: more rows fill the device by themselves, and torch's kernels are better
LEAST = 32  # lower bound on the terms of the sum
LAUNCH = {"num_warps": 4, "num_stages": 3}
PROGRAMS = 132  # one per processor of a large GPU: other runs use it too


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether a (..., M, K) b (..., K, N) suits this kernel."""
    rows, terms = a.shape[-2:]
    return (
        0 < rows <= ROWS
        and LEAST <= terms == b.shape[-2]
        and a.device == b.device
        and 16 < b.shape[-1] < 1 << 20
        and a.shape[:-1].numel() * b.shape[-1] < MOST
        and torch.get_float32_matmul_precision() == "highest"
        and not torch.is_autocast_enabled("cuda")
        and all(
            tensor.is_cuda
            and tensor.dtype == torch.float32
            and not is_functorch_wrapped_tensor(tensor)
            and reach(tensor) + 128 * max(tensor.stride()[-2:]) < MOST  # plus a tile
            and min(tensor.stride()[-2:]) == 1
            for tensor in (a, b)
        )
    )


@torch.library.custom_op("trgp::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N), each with an axis along which numbers are adjacent."""
    m, k, n = *a.shape, b.shape[1]
    tiles = _tiles(a, b)
    blocks, columns, pieces = (triton.cdiv(*each) for each in zip((m, n, k), tiles, strict=True))
    each = min(pieces, triton.cdiv(pieces * blocks * columns, PROGRAMS))
    count = triton.cdiv(pieces, each)
    y = _result(a, b)
    parts = y.unsqueeze(0) if count == 1 else y.new_empty(count, m, n)
    with torch.cuda.device_of(a):
        _product[blocks, columns, count](
            a, b, parts, m, n, k, 0, *a.stride(), 0, *b.stride(), each, count, *tiles, **LAUNCH
        )
        if count > 1:
            add_up(parts, y)
    return y


@product.register_fake
def _result(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def products(a: Tensor, b: Tensor) -> Tensor:
    """a (R, M, K) b (R, K, N), each sum in one piece: several products fill the device."""
    r, m, k, n = *a.shape, b.shape[2]
    tiles = _tiles(a[0], b[0])
    blocks, columns, pieces = (triton.cdiv(*each) for each in zip((m, n, k), tiles, strict=True))
    y = a.new_empty(r, m, n)
    with torch.cuda.device_of(a):
        _product[blocks, columns, r](
            a, b, y, m, n, k, *a.stride(), *b.stride(), pieces, 1, *tiles, **LAUNCH
        )
    return y


def _tiles(a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Tile sizes, by trial: a tile of b suits the units if its columns are contiguous."""
    turned = b.stride(0) == 1
    tall = min(64 if turned else 32, max(16, triton.next_power_of_2(a.shape[0])))
    return (tall, 128, 32) if not turned and b.shape[1] >= 512 else (tall, 64, 64)


@torch.library.custom_op("trgp::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight) of x (M, K) and weight (N, K)."""
    return product(x, weight.t())


@linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _result(x, weight.t())


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = product(dy, weight) if fits(dy, weight) else dy @ weight
    if ctx.needs_input_grad[1]:
        dw = dy.t() @ x
    return dx, dw


linear.register_autograd(_backward, setup_context=_remember)


@triton.jit
def _product(
    a, b, parts, M, N, K, SAR, SAM, SAK, SBR, SBK, SBN, each, count,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one part of the sum over K, `each` pieces of BK, of one of several products."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    a += tl.program_id(2) // count * SAR
    b += tl.program_id(2) // count * SBR
    part = tl.program_id(2) % count
    total = tl.zeros((BM, BN), tl.float32)
    for piece in range(part * each, part * each + each):
        k = piece * BK + tl.arange(0, BK)
        there = (m < M)[:, None] & (k < K)[None, :]
        left = tl.load(a + m[:, None] * SAM + k[None, :] * SAK, mask=there, other=0.0)
        there = (k < K)[:, None] & (n < N)[None, :]
        right = tl.load(b + k[:, None] * SBK + n[None, :] * SBN, mask=there, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    kept = (m < M)[:, None] & (n < N)[None, :]
    at = tl.program_id(2) * M * N + m[:, None] * N + n[None, :]
    tl.store(parts + at, total, mask=kept)
