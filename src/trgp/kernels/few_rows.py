"""Products of a few rows with a matrix, y = a b, in full float32 on units that round to TF32.

Each number is split into two that TF32 can hold, and of the four products of such halves the three
that matter are summed: that comes at least as close as float32 arithmetic, in less time. Torch's
library has no kernel for so few rows that fills a GPU; here the sum over K is cut into parts, which
are added up in order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .parts import add_up

ROWS = 128  # at most: more fill the device by themselves, and torch's kernels are the better ones
LEAST = 128  # terms of the sum
PROGRAMS = 264  # two for every processor of a large GPU


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether a (M, K) b (K, N) is what this is for."""
    rows, terms = a.shape
    return (
        0 < rows <= ROWS
        and LEAST <= terms == b.shape[0]
        and a.device == b.device
        and 16 < b.shape[1] < 1 << 20
        and torch.get_float32_matmul_precision() == "highest"
        and not torch.is_autocast_enabled("cuda")
        and all(
            tensor.is_cuda
            and tensor.dtype == torch.float32
            and not is_functorch_wrapped_tensor(tensor)
            and max(tensor.shape) * max(tensor.stride()) < 1 << 30  # in 32 bits, a tile more too
            and min(tensor.stride()) == 1
            for tensor in (a, b)
        )
    )


@torch.library.custom_op("trgp::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N), both with a side along which numbers are neighbours."""
    (m, k), n = a.shape, b.shape[1]
    # By trial: a tile of b lies right for the units if its columns are runs of neighbours.
    high = 64 if b.stride(0) == 1 else 32
    tiles = (min(high, max(16, triton.next_power_of_2(m))), 64, 64)
    blocks, columns = triton.cdiv(m, tiles[0]), triton.cdiv(n, tiles[1])
    pieces = triton.cdiv(k, tiles[2])
    each = triton.cdiv(pieces * blocks * columns, PROGRAMS)
    count = triton.cdiv(pieces, each)
    y = _result(a, b)
    parts = y.unsqueeze(0) if count == 1 else y.new_empty(count, m, n)
    with torch.cuda.device_of(a):
        _product[(blocks, columns, count)](
            a, b, parts, m, n, k, *a.stride(), *b.stride(), each, *tiles, num_warps=4, num_stages=3
        )
        if count > 1:
            add_up(parts, y)
    return y


@product.register_fake
def _result(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


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
    a, b, parts, M, N, K, SAM, SAK, SBK, SBN, each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the sum over K: `each` pieces of BK."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    total = tl.zeros((BM, BN), tl.float32)
    for piece in range(part * each, part * each + each):
        k = piece * BK + tl.arange(0, BK)
        there = (m < M)[:, None] & (k < K)[None, :]
        left = tl.load(a + m[:, None] * SAM + k[None, :] * SAK, mask=there, other=0.0)
        there = (k < K)[:, None] & (n < N)[None, :]
        right = tl.load(b + k[:, None] * SBK + n[None, :] * SBN, mask=there, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    kept = (m < M)[:, None] & (n < N)[None, :]
    tl.store(parts + part * M * N + m[:, None] * N + n[None, :], total, mask=kept)
