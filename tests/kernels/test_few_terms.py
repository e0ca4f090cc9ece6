"""A large matrix moves along a short sum as exactly as in float32."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from trgp.fast.kernels.few_terms import add_product, fits


def given(m: int, r: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(m + r + n)
    shapes = (m, n), (m, r), (r, n)
    return tuple(torch.randn(*shape, generator=draw).to(device) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("size", [(130, 48, 140), (200, 70, 129), (64, 192, 300)])
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_it_is_as_exact_as_float32(size: tuple[int, int, int], turned: bool, device: str) -> None:
    W, left, right = given(*size, device)
    if turned:
        left, right = (t.t().contiguous().t() for t in (left, right))
    exact = W.double() - 0.5 * left.double() @ right.double()
    scale = W.double().abs() + left.double().abs() @ right.double().abs()
    moved = W.clone()
    add_product(moved, left, right, -0.5)
    # TF32 would be a hundred times as far off.
    assert ((moved - exact).abs() <= 4 * torch.finfo(W.dtype).eps * scale).all()
    again = W.clone()
    add_product(again, left, right, -0.5)
    assert torch.equal(moved, again)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of numpy, which interprets it
@pytest.mark.parametrize(
    "bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800000], ids=["nan", "nan too", "inf"]
)
def test_what_is_no_number_is_seen(bits: int, device: str) -> None:
    """A GPU's own has all bits set, which rounding as if it were one would turn to 0."""
    W, left, right = given(130, 48, 140, device)
    left[3, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    add_product(W, left, right, 1.0)
    assert not W[3].isfinite().any()
    assert W[2].isfinite().all()


def test_large_numbers_stay_finite(device: str) -> None:
    W, left, right = given(130, 48, 140, device)
    left[3, 5] = torch.finfo(torch.float32).max
    add_product(W, left, 1e-30 * right, 1.0)
    assert W.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_for_large_matrices_in_full_precision() -> None:
    W, left, right = given(2048, 64, 1024, "cuda")
    assert fits(W, left, right)
    assert not fits(W[:1000], left[:1000], right)
    assert not fits(W.t().contiguous().t(), left, right)
    assert not fits(W, left[:, :40], right[:40])
    assert not fits(W.double(), left.double(), right.double())
    assert not fits(W, left, right[:, :512])
