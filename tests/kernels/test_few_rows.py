"""Products of a few rows are torch's, at least as exact, and have torch's gradients."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from trgp.fast.kernels.few_rows import fits, linear, product, products
from trgp.fast.kernels.parts import add_up

SIZES = [(1, 128, 17), (10, 784, 100), (64, 300, 130), (65, 129, 33), (128, 576, 172)]


def given(m: int, k: int, n: int, device: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(m + k + n)
    return (torch.randn(*shape, generator=draw).to(device) for shape in ((m, k), (k, n)))  # type: ignore[return-value]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_it_is_as_exact_as_float32(size: tuple[int, int, int], turned: str, device: str) -> None:
    a, b = given(*size, device)
    a = a.t().contiguous().t() if "a" in turned else a
    b = b.t().contiguous().t() if "b" in turned else b
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    # TF32 would be a hundred times as far off.
    assert ((product(a, b) - exact).abs() <= 4 * torch.finfo(a.dtype).eps * scale).all()
    assert torch.equal(product(a, b), product(a, b))


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "one for all"])
def test_several_at_once(shared: bool, device: str) -> None:
    a, b = (torch.stack([t, -t, t.flip(0)]) for t in given(10, 100, 300, device))
    b = b[:1].expand_as(b) if shared else b
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((products(a, b) - exact).abs() <= 4 * torch.finfo(a.dtype).eps * scale).all()


def test_a_part_of_a_matrix_will_do(device: str) -> None:
    a, b = given(20, 150, 60, device)
    found = product(a[3:9, :140], b[5:145, 7:50])
    torch.testing.assert_close(found, a[3:9, :140] @ b[5:145, 7:50], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("first", [True, False], ids=["input", "weight alone"])
def test_gradients_are_torchs(first: bool, device: str) -> None:
    x, w = given(7, 140, 40, device)
    w = w.t().contiguous()
    x.requires_grad_(first)
    w.requires_grad_()
    wanted = [x, w] if first else [w]
    dy = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)).to(device)
    own = torch.autograd.grad(linear(x, w), wanted, dy)
    for one, other in zip(own, torch.autograd.grad(x @ w.t(), wanted, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_torch_knows_what_the_operations_return(device: str) -> None:
    a, b = given(5, 130, 20, device)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(product, (a, b), test_utils=tests)
    torch.library.opcheck(linear, (a, b.t().contiguous()), test_utils=tests)


@pytest.mark.parametrize("parts", [1, 2, 5, 128, 300])
@pytest.mark.parametrize("taps", [1, 4])
def test_parts_are_added_up(parts: int, taps: int, device: str) -> None:
    each = torch.randn(parts, 3, taps, 5, generator=torch.Generator().manual_seed(0)).to(device)
    whole = torch.empty(3, 5, taps, device=device)
    add_up(each, whole, 5, taps)
    torch.testing.assert_close(whole, each.sum(0).transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_for_few_rows_of_long_sums_in_full_precision() -> None:
    a, b = given(64, 300, 130, "cuda")
    assert fits(a, b)
    assert not fits(torch.cat([a] * 4), b)
    assert not fits(a[:, :30], b[:30])
    assert fits(torch.stack([a] * 5), torch.stack([b] * 5))
    assert not fits(a.expand(1 << 19, -1, -1), b.expand(1 << 19, -1, -1))  # the result is too large
    assert not fits(a.double(), b.double())
    assert not fits(a[:, ::2], b[::2])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert not fits(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
