"""W + alpha left right with a short sum: a large matrix moves along a few directions.

The arithmetic is float32 on units that round to TF32, as in `few_rows`, with at most three times
the error of torch's products. Here every number takes part in many products: both matrices are
therefore split beforehand, and transposed, since the units read along the sum. Every place of W is
read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reach import MOST, reach

TERMS = range(48, 513)  # of the sum; fewer gain too little
LARGE = 1 << 21  # numbers in W; on smaller ones torch's kernels are as fast
TILES = (128, 128, 16)
LAUNCH = {"num_warps": 4, "num_stages": 3}


def fits(W: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether W (M, N) + left (M, R) right (R, N) suits this kernel."""
    (m, n), r = W.shape, left.shape[1]
    return (
        W.is_cuda
        and r in TERMS
        and m * n >= LARGE
        and left.shape == (m, r)
        and right.shape == (r, n)
        and torch.get_float32_matmul_precision() == "highest"
        and not torch.is_autocast_enabled("cuda")
        and W.is_contiguous()
        and 2 * (m + n) * r < MOST  # halves
        and all(
            tensor.dtype == torch.float32
            and tensor.device == W.device
            and min(tensor.stride()) == 1
            and reach(tensor) < MOST
            for tensor in (W, left, right)
        )
    )


def add_product(W: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """W += alpha left right."""
    (m, n), r = W.shape, left.shape[1]
    tall, wide, _ = TILES
    with torch.cuda.device_of(W):
        a, b = _halves(left), _halves(right.t())
        _add_product[triton.cdiv(m, tall), triton.cdiv(n, wide)](
            a, b, W, float(alpha), m, n, r, *TILES, **LAUNCH
        )


def _halves(x: Tensor) -> Tensor:
    """Split x (N, R) into (2, N, R), two TF32 numbers with a sum as close as possible."""
    n, r = x.shape
    y = x.new_empty(2, n, r)
    _split[triton.cdiv(n, 64), triton.cdiv(r, 32)](x, y, n, r, *x.stride(), 64, 32)
    return y


@triton.jit
def _split(x, y, N, R, SN, SR, BN: tl.constexpr, BR: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    there = (n < N)[:, None] & (r < R)[None, :]
    value = tl.load(x + n[:, None] * SN + r[None, :] * SR, mask=there, other=0.0)
    # NaN, infinities and numbers too large to round stay unchanged, so that a divergence stays
    # visible.
    usual = tl.abs(value) < 3.4e38
    known = tl.where(usual, value, 0.0)
    high = _nearest(known)
    at = y + n[:, None] * R + r[None, :]
    tl.store(at, tl.where(usual, high, value), mask=there)
    tl.store(at + N * R, _nearest(known - high), mask=there)


@triton.jit
def _nearest(x):
    """Round to the nearest TF32 number, in which the last 13 bits are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(
    a, b, w, alpha, M, N, R, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the product of a (2, M, R) and b (2, N, R), the halves of both matrices, to w."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, R, BK):
        k = start + tl.arange(0, BK)
        there = (m < M)[:, None] & (k < R)[None, :]
        at = a + m[:, None] * R + k[None, :]
        high = tl.load(at, mask=there, other=0.0)
        low = tl.load(at + M * R, mask=there, other=0.0)
        there = (n < N)[:, None] & (k < R)[None, :]
        at = b + n[:, None] * R + k[None, :]
        right = tl.load(at, mask=there, other=0.0)
        total = tl.dot(high, right.T, total, input_precision="tf32")
        total = tl.dot(low, right.T, total, input_precision="tf32")
        right = tl.load(at + N * R, mask=there, other=0.0)
        total = tl.dot(high, right.T, total, input_precision="tf32")
    there = (m < M)[:, None] & (n < N)[None, :]
    at = w + m[:, None] * N + n[None, :]
    tl.store(at, tl.load(at, mask=there) + alpha * total, mask=there)
